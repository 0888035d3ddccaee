"""What starts ranks: ``local`` on this machine, ``slurm`` in a job.

Each makes a ``Launch`` and hands it to ``launch.supervisor``.
"""
