"""What starts ranks: ``local`` on this machine, ``hosts`` on those that a remote shell reaches, ``slurm`` in its jobs.

Each makes a ``Launch`` and hands it to ``launch.supervisor``. In jobs of other schedulers ``batch_systems`` says which
hosts and which remote shell; ``runners`` are hosts that have dialled home,
and ``ray_cluster`` and ``spark_cluster`` have those of such a cluster do that, also from a program by ``fitting``.
``unread`` names the keys that an engine does not read.

Commands submit to what ``schedulers`` names, behind the protocol in ``scheduler``: Slurm in ``slurm/``, Kubernetes in
``kubernetes/``. ``jobs`` is the record of what was submitted for a run, ``status`` how its jobs and the run stand.
"""
