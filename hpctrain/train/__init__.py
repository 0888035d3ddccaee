"""The training loop, and what attaches to it. Knows no framework.

``loop`` is the loop; it drives a ``framework`` (a protocol) and calls ``hooks``. ``state`` is the position of a run and
its named tensors, ``schedule`` its length and learning rates, ``seeds`` its random states. ``evaluation`` computes
``metrics`` over validation data; ``watchers`` are hooks for early stopping, plateaus, weight checks and profiling;
``flops`` estimates model FLOPs utilisation, ``data_sheets`` has peaks of GPUs; ``clock`` times the phases of a step.

``walk_objects`` and ``tree`` find and flatten what the user's objects hold, ``stateful`` covers objects with a
``state_dict``, and ``saved_arrays`` reads saved values, whole or in part.
"""
