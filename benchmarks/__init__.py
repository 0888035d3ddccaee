"""What developers measure, from a checkout: ``python -m benchmarks.NAME``.

``step`` and ``checkpoint`` compare hpctrain with other libraries, ``reduce`` times the exchange of gradients alone.
``parallel`` compares plans with one process and with PyTorch's own ways, ``recovery`` what a killed rank costs with
the same under torchrun, ``snapshots`` what copies of the state in node memory cost. ``convergence`` shows what saving
bytes costs in loss, ``straggler`` replays slowdowns through the monitor, ``simulate`` shows what very many ranks cost,
``two_hosts`` limits a step by its network. What people measure on their own cluster is ``hpctrain bench``.
``program`` is how each starts. ``gpu_proof`` is ``env/gpu-proof``: whether hpctrain is right on a GPU, and how fast.
"""
