"""What tells of a run while it trains: its events, and the sinks that show them.

``sink`` is the protocol; ``console``, ``tensorboard``, ``mlflow`` (through ``mlflow_follower``, a process of its own)
and ``prometheus`` implement it; ``events_hook`` feeds them from the Trainer.
"""
