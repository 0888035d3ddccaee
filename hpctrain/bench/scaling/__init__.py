"""How a run scales: measured at several sizes, fitted, and what more nodes would be worth.

``scaling_command`` is the way in. ``model`` and ``report`` are pure; ``runs`` makes and starts the runs, and
``exchange`` is the program that measures an exchange of gradients.
"""
