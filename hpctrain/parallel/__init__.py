"""Training of what does not fit on one rank.

``sharded`` says which rows of which parameters each rank updates, and ``sharded_exchange`` moves gradients to who
updates and parameters back. ``torch_sharded`` is what a framework gets of it, and ``torch_probe`` asks an optimizer how
its parameters may be shared out. The names below are for other rooms; torch is loaded by the modules that need it.
"""
