"""Ranks without the seconds that importing a framework takes each: a process that has imported it forks them.

``forking`` starts that process, ``parent``, for a run on this machine. In place of each rank mpirun starts a
``stand_in``: it hands arguments, environment, folder and standard streams over to the parent, which forks the rank; it
passes signals on, and ends as the rank does. If the parent does not answer, the stand-in becomes the rank.

Only with Open MPI, whose ranks find mpirun by their environment: those of MPICH and Intel MPI inherit a descriptor.
"""
