"""One command that checks hpctrain's correctness and speed on a GPU: ``env/gpu-proof``.

``rows`` is the table of trials. Each row runs in separate processes (``launch`` starts them, ``one_row`` runs in them),
compares numbers, and fails if they are wrong. ``page`` formats the results; ``wheels`` provides packages for a machine
without a network.
"""
