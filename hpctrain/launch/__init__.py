"""Outside the ranks: starts them, watches them, outlives them, and decides what follows.

``supervisor`` runs one attempt for any launcher, as ``attempt`` watches it; ``engines`` say what starts ranks here and
under Slurm; ``forks`` has ranks on this machine forked from one process; ``mpi_library`` finds mpirun, and runs a
program of ours on ranks outside any run; ``sweep`` makes many runs of one. The other files read what launchers print.
No MPI and no framework.
"""
