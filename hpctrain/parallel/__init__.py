"""Training of what does not fit on one rank.

``tensor_words`` is what a task says of how its layers are cut, and ``torch_tensor`` cuts those of a PyTorch model:
``torch_region`` has the sums between the ranks that share it out. ``sharded`` says which rows of which parameters each
rank updates, ``sharded_exchange`` moves gradients to who updates and parameters back, and ``torch_sharded`` is what a
framework gets of it. ``torch_probe`` asks an optimizer whether its parameters may be shared out or cut. ``plan`` says
what a rank needs under each plan. The names above are for other rooms; torch is loaded by the modules that need it.
"""
