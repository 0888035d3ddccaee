"""One folder for each framework; code that PyTorch and Keras share is next to them.

``torch`` and ``tensorflow`` each implement train.framework.Framework. ``update`` decides what happens to summed
gradients, ``local_training`` runs local training (local SGD, DiLoCo), ``named_state`` loads and compares tensors by
name, and ``joint_statistics`` computes BatchNorm statistics over all ranks.
"""
