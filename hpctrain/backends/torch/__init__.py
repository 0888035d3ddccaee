"""PyTorch: ``framework`` trains and evaluates a model on this rank's ``device``.

``task`` opens a task, ``strategies`` partition models and optimizers over ranks, ``steps`` make updates, ``reduce``
sums gradients, ``state`` names tensors, ``metrics`` adapts torchmetrics, ``performance`` counts operations and
profiles, and ``bench`` has the models of hpctrain.bench.
"""
