"""One command that shows whether hpctrain is right on a GPU, and how fast: ``env/gpu-proof``.

``rows`` is the table of what is tried. Each row runs in separate processes (``launch`` starts them, ``one_row`` is
inside them), compares numbers, and fails if they are wrong. ``page`` writes what came out, ``wheels`` brings along what
a machine without a network lacks.
"""
