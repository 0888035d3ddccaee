"""Finds slow and hung ranks.

``rank_monitor`` is the part inside a rank (also for the Trainer), whose ``ring_clock`` records phases; on a CUDA
stream, the backend records them instead. ``node`` is the agent on each node, which reads its ranks' shared memory
(``shared``) and summarizes windows of steps (``window``). ``chief`` decides who is slow or hung. ``connection`` and
``framing`` are the protocol between agents.
"""
