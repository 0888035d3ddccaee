"""Injects slowdowns into recorded healthy traces, and counts how often the monitor names the right rank and cause.

Start with ``__main__``. ``record`` runs on the ranks, ``traces`` handles the recorded times, and ``trials`` counts the
results.
"""
