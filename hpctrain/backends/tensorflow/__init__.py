"""Keras on TensorFlow: ``framework`` trains and evaluates a model; ``runtime`` makes process-wide settings.

``task`` opens a task, ``strategies`` distribute updates, ``steps`` make updates, ``reduce`` sums gradients, ``state``
names variables, ``performance`` counts operations and profiles, and ``bench`` has the models of hpctrain.bench.
"""
