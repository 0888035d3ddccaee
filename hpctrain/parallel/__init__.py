"""The framework-independent part of training models that do not fit on one rank.

``pipeline`` assigns layers to stages, orders their passes, and keeps the choice across attempts. ``sharded`` assigns
rows of parameters to ranks, and ``sharded_exchange`` sends gradients to their owners and parameters back.
``memory_estimate`` estimates the memory per rank under each plan.
"""
