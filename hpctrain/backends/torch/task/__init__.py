"""From a PyTorch task to a model on this rank's device: ``opening``, after ``checks`` and a dry call.

Models built without values get memory in ``opening``. ``holdings`` finds state that a task keeps outside its model and
optimizers; hidden states are ``carried`` over batches. ``shares`` are parameters by optimizer. ``recompute`` repeats
layers in the backward pass, and ``sync_batchnorm`` normalises over all ranks. ``data_loader`` adapts torch Datasets,
and takes dataset, order and collate_fn out of a DataLoader. ``by_name`` has losses and optimizers that a task or run
file names.
"""
