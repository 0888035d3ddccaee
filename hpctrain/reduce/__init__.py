"""How sums over ranks are formed, in memory of the host and by Horovod, for any framework.

``candidates`` are the ways there are, and ``reducer_choice`` takes one. ``layout`` says what travels,
``compression`` in which 16 bits, ``int8_sum`` in 8, which keeps what it rounds off; ``mpi_allreduce``,
``shm_allreduce``, ``shm_pieces``, ``ring_allreduce`` and ``streamed_allreduce`` add it up in host memory, as
``host_allreduce`` opens them, and Horovod does if ``horovod_setup`` lets it. ``row_exchange`` is for rows of
embeddings; ``outer_step`` is for ranks that train apart.
"""
