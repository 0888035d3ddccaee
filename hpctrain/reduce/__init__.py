"""Sums over ranks in host memory, for any framework, and the choice between them and Horovod.

``candidates`` lists the ways to sum gradients, and ``reducer_choice`` picks one. ``flat_layout`` plans the flat buffer.
``host_allreduce`` opens the sums in host memory: ``mpi_allreduce``, ``shm_allreduce`` and
``streamed_allreduce``, which may send 16 bits per value.
``horovod_setup`` checks and starts Horovod. ``row_exchange`` sums rows of embeddings; ``outer_step`` is for local
training.
"""
