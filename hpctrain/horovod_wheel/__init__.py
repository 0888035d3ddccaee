"""Builds a wheel of Horovod against the frameworks, MPI and CUDA that are installed.

``toolchain`` finds those, ``patch`` edits the sources and identifies what is built, ``build`` makes the wheel, keeps
it and says whose wheels are taken.
"""
