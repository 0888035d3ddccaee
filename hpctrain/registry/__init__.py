"""Registers trained models: ``register`` fills MLflow's registry and writes a model card.

``served_model`` is the code that MLflow loads later.
"""
