"""Fault injection by a fixed seed: ``python -m tests.chaos --seed 1 --faults 10``.

``faults`` injects the faults from outside, ``task_torch`` and ``task_keras`` are the models that are trained, and
``invariants`` compares the run with an undisturbed one. None of them uses the package's own readers, so that an error
in those cannot hide an error here.
"""
