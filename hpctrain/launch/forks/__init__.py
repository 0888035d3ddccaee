"""Forks ranks from a process that has already imported the framework, to save each rank seconds of import time.

``forking`` starts that process, ``parent``, for a run on this machine. In place of each rank mpirun starts a
``stand_in``, which sends its arguments, environment, working directory and standard streams to the parent. The parent
forks the rank; the stand-in forwards signals and exits as the rank does. If the parent does not answer, the stand-in
becomes the rank.

Open MPI only: its ranks find mpirun through environment variables, while those of MPICH and Intel MPI inherit a file
descriptor, which is not passed to the parent.
"""
