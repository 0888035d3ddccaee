"""How a run scales: measured at several sizes, fitted, and what more nodes would be worth.

``scaling_command`` is the way in. ``plan``, ``fit``, ``model`` and ``report`` are pure; ``runs`` starts the runs, and
``exchange`` is the program that measures an exchange of gradients. ``measured`` reads what was left, and ``plan_steps``
says what it means for plans that share out a model; ``hpctrain.commands.plan`` asks both.
"""
