"""Whether the monitor finds what it should: slow-downs put into recorded healthy traces.

``straggler_command`` is the way in. ``record`` runs on the ranks, ``traces`` holds what they took, and ``trials`` says
how often the monitor is right.
"""
