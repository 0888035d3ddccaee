"""The monitor inside a rank: ``session`` starts it, also for the Trainer, and ``clock`` takes the marks.

On a CUDA stream, the backend marks instead.
"""
