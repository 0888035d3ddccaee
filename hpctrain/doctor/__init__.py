"""Checks the installation and suggests fixes. Works without any framework and without MPI.

``machine``, ``ranks``, ``slurm`` and ``software`` each check one area and return findings, which ``probe`` defines.
``probe`` and ``ranks`` run their checks in separate processes.
"""
