"""Model state: named ``tensors`` for weights and random states, and the ``source`` of all state, including the EMA.

``optimizer`` names optimizer state, and ``scheduler`` steps PyTorch's learning-rate schedulers.
"""
