"""Sums of a torch model's gradients over ranks.

``torch_reducers`` opens and measures reducers, which ``reducer`` defines; by ``streamed_reducer``, the optimizer uses
the first sums while the last are under way. ``gradients`` are a flat buffer, which ``allreduce`` sums by MPI and
``messages`` by process groups or Horovod, and tables of which ``rows`` are sent; ``slots`` are the numbers sent with
them. ``sharded`` sums go to the ranks that update, through host memory by ``sharded_exchange``. ``any_of`` exchanges
flags in programs with their own training loop.
"""
