"""Sums of a torch model's gradients over ranks.

``reducer`` opens and measures reducers. ``gradients`` are a flat buffer, which ``allreduce`` sums by MPI or Horovod,
and rows of embedding tables. ``any_of`` exchanges flags in programs with their own training loop.
"""
