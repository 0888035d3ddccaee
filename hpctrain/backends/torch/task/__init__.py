"""Turns a PyTorch task into a framework on this rank's device: ``opening``, with ``checks`` of the task.

Models on the meta device get memory in ``opening``. ``task_state`` finds state that a task keeps outside its model and
optimizers; ``gradient_hooks`` tries hooks of parameters; ``carried`` carries hidden states over batches. ``shares``
groups parameters by optimizer. ``recompute`` recomputes activations in the backward pass, and ``sync_batchnorm``
normalises over all ranks. ``data_loader`` takes dataset, order and collate_fn from a DataLoader. ``by_name`` makes
losses and optimizers from names.
"""
