"""Sums of a torch model's gradients over ranks.

``torch_reducers`` opens and measures reducers, which ``reducer`` defines. ``gradients`` are a flat buffer, which
``allreduce`` sums by MPI and ``messages`` by process groups or Horovod, and rows of embedding tables; ``slots`` are the
numbers sent with them. ``any_of`` exchanges flags in programs with their own training loop.
"""
