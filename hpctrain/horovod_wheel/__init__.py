"""Builds a wheel of Horovod against the installed frameworks, MPI and CUDA.

``toolchain`` finds those, ``patch`` edits the sources and identifies a build, and ``build`` makes and caches the wheel
and decides which existing wheels to trust.
"""
