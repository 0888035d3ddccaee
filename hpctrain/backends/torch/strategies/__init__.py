"""How a model, its gradients and its optimizer are partitioned over ranks, one module for each strategy.

``strategy`` is the protocol, and replicates what no other strategy partitions; ``listed`` has them in
order: ``tensor``, ``pipeline``, ``meta_init``, ``fsdp`` and ``zero1``. Each has a function
``planned``, which ``task.opening`` calls; those in ``hpctrain plan`` also ``estimate`` memory from an ``estimated``
model.

``partition`` is the part of a model that a rank has; ``parameter_traits`` finds out what optimizers allow, and gives
them rows of parameters, which ``row_shares`` assigns to ranks. ``tp_group`` has the communication of the ranks that
split layers. Ranks send tensors by an ``exchange``: host memory, or a process group of torch. ``memory_estimate``
estimates the memory of each plan; ``built`` weighs a rank whose plan has been built.
"""
