"""Sums of a torch model's gradients over ranks.

``reducer`` opens and measures reducers, which sum the flat buffer of ``gradients`` by ``allreduce`` (MPI or Horovod),
and the gradients of ``sparse_parameters`` by ``sparse_sums``.
"""
