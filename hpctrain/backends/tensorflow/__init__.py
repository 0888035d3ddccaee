"""Keras on TensorFlow: ``framework`` trains and evaluates a model; ``runtime`` makes process-wide settings.

``task`` opens a task, ``steps`` make updates, and ``state`` names variables.
``reducer`` sums gradients in pieces, and ``sparse_sums`` those of embedding tables by rows. ``performance`` counts
operations and profiles, and ``bench`` has the models of hpctrain.bench.
"""
