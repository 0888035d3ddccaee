"""Gradients summed over ranks: ``reducer`` opens and measures the ways to ``allreduce``, by MPI and by Horovod.

They sum the flat buffers of ``gradients``; rows of ``sparse_parameters`` go by ``sparse_sums``.
"""
