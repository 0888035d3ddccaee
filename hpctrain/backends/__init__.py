"""One folder for each framework; what PyTorch and Keras have in common is next to them.

``torch`` and ``tensorflow`` each implement train.framework.Framework. ``update`` decides what happens to summed
gradients, ``local_training`` lets ranks train apart, ``named_state`` loads and compares tensors by name,
and ``joint_statistics`` normalises over ranks.
"""
