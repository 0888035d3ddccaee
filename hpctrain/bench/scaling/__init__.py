"""Measures how a run scales at several sizes, fits a model, and recommends how many nodes are worth it.

Start with ``scaling_command``. ``model`` and ``report`` are pure; ``runs`` makes and starts the runs, and
``exchange`` is the program that measures an exchange of gradients.
"""
