"""Slurm: renders job scripts, submits them, and supervises runs inside jobs.

``submission`` plans and submits jobs, for commands as a ``Scheduler``; ``render`` makes scripts from ``directives``,
with site defaults from ``profile``. Inside a job, ``supervise`` runs attempts on the ``allocation``, which is prepared
by ``stage_on_node`` and checked by ``preflight`` with ``probe``; ``launcher`` chooses srun or mpirun; ``requeue``
continues the run; ``leave_out`` excludes bad nodes; ``time_limit`` says when the ranks must stop; ``standby`` requeues
a job that has lost its supervisor. Only ``client`` runs Slurm's commands.
"""

from pathlib import Path

FILES = Path(__file__).parent / "files"
"""Templates, profiles and examples; in a checkout a link to the top-level ``slurm/``, in a wheel a copy of it."""
