"""Checks the installation and suggests fixes. Works without any framework and without MPI.

``machine``, ``mpi_ranks``, ``slurm`` and ``software`` each check one area and return findings, which ``check`` defines.
``check`` and ``mpi_ranks`` run their checks in separate processes.
"""
