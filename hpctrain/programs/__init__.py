"""Programs that bring their training loop, as ranks of a run: they need neither MPI nor hpctrain's trainer.

``plain_command`` runs a third-party program as a rank, which meets the others in a ``folder_group``. The program may
call ``heartbeat``, so that the monitor watches it, and the functions of ``own_loop``: whether to stop, what is saved.
"""
