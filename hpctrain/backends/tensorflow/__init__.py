"""Keras on TensorFlow: ``framework`` trains and evaluates a model; ``runtime`` settles what TensorFlow reads before it
starts.

``task`` opens what a task brings, ``strategies`` shard optimizers, ``steps`` make updates, ``reduce`` sums gradients,
``state`` names variables, ``performance`` counts operations and traces, and ``bench`` has what hpctrain.bench measures.
"""
