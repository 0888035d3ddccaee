"""Finds slow and hung ranks.

``rank`` is the part inside a rank; start with ``rank.session``. ``node`` is the agent on each node, which reads its
ranks' shared memory (``shared``) and summarizes windows of steps (``window``). ``chief`` decides who is slow or hung.
``wire`` is the protocol between agents.
"""
