"""Combinations of features that are refused, by subject: a row has what is wrong and what to do.

``sums`` has those of ways to sum gradients, ``plans`` of models larger than a rank, ``training`` of both frameworks,
``torch_tasks`` and ``keras_tasks`` of one.
"""
