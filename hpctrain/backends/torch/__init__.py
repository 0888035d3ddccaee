"""PyTorch: ``framework`` trains a model on this rank's ``device``, and evaluates it.

``task`` opens what a task brings, ``strategies`` cut models and optimizers over ranks, ``steps`` make updates,
``reduce`` sums gradients, ``state`` names tensors, ``metrics`` are as the loop has them, ``performance`` counts
operations and traces, and ``bench`` has what hpctrain.bench measures.
"""
