"""Builds a wheel of Horovod against the frameworks, MPI and CUDA that are installed.

``toolchain`` finds those, ``recipe`` identifies what is built of them, ``patch`` edits the sources, ``build`` makes the
wheel, and ``cache`` keeps it and checks that it is what was built.
"""
