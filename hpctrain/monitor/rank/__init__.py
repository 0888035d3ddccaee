"""The monitor inside a rank: ``session`` starts it, ``clock`` takes the marks, ``hook`` joins both to the Trainer.

``torch_clock`` marks on a CUDA stream instead.
"""
