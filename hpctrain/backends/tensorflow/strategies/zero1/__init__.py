"""Optimizer state sharded over the data ranks: ``strategy`` decides what may be cut, as ``probe`` finds by trying.

``sharded`` scatters gradients and gathers parameters.
"""
