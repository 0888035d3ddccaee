"""A run that things befall, by a fixed seed: ``python -m tests.chaos --seed 1 --faults 10``.

``faults`` does it from outside, ``task_torch`` and ``task_keras`` are what is trained, ``invariants`` compares the run
with one that nothing befell. None of them uses the package's own readers: an error there cannot hide one here.
"""
