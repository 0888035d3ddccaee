"""Weights and random states as named ``tensors``, and the ``source`` of all state, moving averages among it.

``optimizer`` names what optimizers hold, and ``scheduler`` sets rates.
"""
