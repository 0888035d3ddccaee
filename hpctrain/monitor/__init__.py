"""Finds slow and hung ranks.

``rank`` is the monitor inside a rank, and ``rank.session`` the way in; ``node`` is the agent of a node, which reads its
ranks' memory (``shared``) and condenses windows (``window``); ``chief`` decides; ``wire`` is how agents talk.
"""
