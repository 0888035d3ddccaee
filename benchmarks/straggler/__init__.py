"""Slowdowns put into recorded healthy traces, and how often the monitor names the right rank and cause.

``__main__`` is the way in. ``record`` runs on the ranks, ``traces`` holds what they took, and ``trials`` counts how
often the monitor is right.
"""
