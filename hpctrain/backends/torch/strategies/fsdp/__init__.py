"""``parallel.shard: parameters`` and ``gradients``: each rank has some rows of all parameters; layers are gathered to
compute, by FSDP2 of PyTorch.

``fsdp_strategy`` is the strategy. ``layers`` finds what is gathered together, ``sharded_model`` shards a model, and
``fsdp_reducer`` has the sums of FSDP2 as a reducer; ``complete_sums`` makes them the same on all ranks. ``layer_order``
compares ranks; ``fsdp_memory`` estimates memory.
"""
