"""Rank and world size: the ranks of a job, and what they exchange.

``group`` has the collectives and all waits of ranks for each other, each of which ends after a time limit, and
``world`` finds out which ranks there are. Needs mpi4py only if there are several.
"""
