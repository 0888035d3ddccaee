"""PyTorch: ``torch_framework`` trains and evaluates a model on this rank's ``device``; only
``accelerator`` calls the APIs of devices.

``task`` opens a task, ``strategies`` partition models and optimizers over ranks, ``steps`` make updates, ``reduce``
sums gradients, ``process_groups`` connect devices of ranks, ``flat_weights`` serves local training, ``state`` names
tensors, ``torch_metrics`` adapts torchmetrics, ``performance`` counts operations and
profiles, ``measure`` measures links and devices, ``collective_watch`` writes what a hanging rank waits in,
``graph_export`` exports a forward pass, and ``torch_bench_models`` has the models of hpctrain.bench.
"""
