"""Sums over ranks in host memory, for any framework, and the choice between them and Horovod.

``candidates`` lists the ways to sum gradients, and ``reducer_choice`` picks one. ``layout`` plans the flat buffer;
``compression`` packs values into 16 bits, and ``int8_sum`` into 8, with error feedback. ``host_allreduce`` opens the
sums in host memory: ``mpi_allreduce``, ``shm_allreduce``, ``shm_pieces``, ``ring_allreduce`` and
``streamed_allreduce``. ``horovod_setup`` checks and starts Horovod. ``row_exchange`` sums rows of embeddings;
``outer_step`` is for local training. ``refusals`` lists combinations that do not work.
"""
