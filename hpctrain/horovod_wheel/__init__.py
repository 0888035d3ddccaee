"""Builds a wheel of Horovod against the frameworks, MPI and CUDA that are installed."""
