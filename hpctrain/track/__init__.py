"""Live tracking of a run: its events, and the sinks that show them.

``sink`` is the protocol, ``sinks`` the table of those that a run file can name, each in a file of its name (``mlflow``
and ``wandb`` are processes, each a ``follower`` of the events), next to the ``console``; ``events_hook``
feeds them from the Trainer.
"""
