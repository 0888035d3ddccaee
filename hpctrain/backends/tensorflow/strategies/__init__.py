"""Strategies that distribute updates of a Keras model over ranks: ``strategy`` (replicated weights) and ``zero1``."""
