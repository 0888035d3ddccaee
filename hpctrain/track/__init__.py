"""Live tracking of a run: sends its events to sinks.

``sink`` is the protocol; ``sinks`` lists those that a run file can name, each in a file of its name, besides the
``console``. ``mlflow`` and ``wandb`` run as processes, each a ``follower`` of the events. ``events_hook`` produces the
events in the Trainer.
"""
