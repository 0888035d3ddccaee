"""Training of what does not fit on one rank, as far as no framework is needed.

``tensor_words`` is what a task says of how its layers are cut. ``pipeline`` says which layers each stage of a pipeline
has, in which order it passes micro-batches, and how a run keeps its stages. ``sharded`` says which rows of which
parameters each rank updates, and ``sharded_exchange`` moves gradients to who updates and parameters back.
``memory_estimate`` is what a rank needs for a model, under each plan.
"""
