"""Finds slow and hung ranks: phase clock, statistics, and one agent a node. ``session.start`` is the way in."""
