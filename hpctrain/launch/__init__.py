"""Code outside the ranks: it starts them, watches them, outlives them, and decides what to do when they end.

``supervisor`` runs attempt after attempt, each watched by ``attempt``; ``engines`` start ranks on this machine, under
Slurm and elsewhere; ``forks`` forks the ranks on this machine from one process; ``mpi_library`` finds mpirun, and runs
hpctrain programs on ranks outside any run; ``sweep`` expands one run file into many runs; ``nested_launcher`` refuses
programs that start ranks themselves. ``postmortem`` and
``launcher_messages`` find out why ranks died; ``outage_retry`` retries services that are down. No MPI, no framework.
"""
