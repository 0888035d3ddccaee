"""How a model and its optimizer are partitioned over ranks, one module for each way; ``strategy`` is the protocol.

``listed`` names them all, with what does not work with each: ``tensor``, ``pipeline``, ``tables``, ``fully_sharded``,
``zero1``, ``zero2``; a model is ``replicated`` if no other one takes it. Each has a function ``planned``, which
``task.opening`` calls, and one that says what it leaves a rank, of a model that is ``estimated`` for ``hpctrain plan``.
``partition`` is what a rank has of a model; ``parameter_traits`` says what optimizers allow, and has them hold rows of
parameters. ``region`` is where cut layers begin and end. Ranks send tensors by an ``exchange``: memory of the host, or
a process ``group`` of torch.
"""
