"""Slurm: job scripts as pure text, the commands around them, and what a job does before its ranks start.

``submission`` brings a run file into the queue, ``supervise`` runs inside the job, and ``status`` says where a run
stands. ``client`` alone runs Slurm's commands; ``directives`` is what a job asks for, as data;
``leave_out`` are the nodes that it does not want.
"""

from pathlib import Path

FILES = Path(__file__).parent / "files"
"""Templates, profiles and examples: in a checkout a link to the top-level ``slurm/``, whose files a wheel carries."""
