"""Strategies that distribute updates of a Keras model over ranks: ``strategy`` (replicated weights) and ``zero1``.

``probe`` finds out which optimizer state ``zero1`` can cut.
"""
