"""Engines that start ranks: ``local`` on this machine, ``hosts`` by a remote shell, ``slurm`` in Slurm jobs.

Each makes a ``Launch`` for ``launch.supervisor``. In jobs of other schedulers, ``batch_systems`` gives the hosts and
the remote shell. ``runners`` uses nodes that have connected to the supervisor. ``unread_keys`` warns about keys that an
engine ignores.

Commands submit jobs through ``schedulers``, which implement the protocol in ``scheduler``: Slurm in ``slurm/``,
others in ``batch_jobs``. ``jobs`` records what was submitted for a run; ``status`` reports the state of runs and their
jobs.
"""
