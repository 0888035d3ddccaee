"""Model state: named ``tensors`` for weights and random states; ``torch_state`` has all state, the EMA included.

``torch_leaves`` are the tensors in trees of other objects. ``optimizer`` names optimizer state, and ``lr_scheduler``
steps PyTorch's learning-rate schedulers.
"""
