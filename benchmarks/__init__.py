"""Benchmarks for developers, run from a checkout: ``python -m benchmarks.NAME``.

``step`` and ``checkpoint`` compare hpctrain with other libraries; ``reduce`` times only the exchange of gradients.
``parallel`` compares plans with one process and with PyTorch's own implementations, ``recovery`` the cost of a killed
rank with torchrun; ``snapshots`` measures the cost of copies of the state in node memory, ``reading`` rates of reading
samples. ``convergence`` shows what saving bytes costs in loss, ``straggler`` replays slowdowns through the monitor,
``simulate`` measures the cost of very many ranks, ``two_hosts`` and ``apart`` train over a slow link. Users measure
their own cluster with ``hpctrain bench``. ``program`` starts each benchmark. ``gpu_proof`` is ``env/gpu-proof``:
correctness and speed on a GPU.
"""
