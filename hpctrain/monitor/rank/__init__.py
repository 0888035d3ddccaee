"""The monitor inside a rank: ``session`` starts it (also for the Trainer), and ``clock`` records phases.

On a CUDA stream, the backend records them instead.
"""
