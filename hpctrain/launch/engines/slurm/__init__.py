"""Slurm: job scripts as pure text, the commands around them, and what a job does before its ranks start."""
