"""ZeRO-1: optimizer state sharded over the data ranks. ``strategy`` shards what ``probe`` finds can be cut.

``sharded`` reduce-scatters gradients and gathers parameters.
"""
