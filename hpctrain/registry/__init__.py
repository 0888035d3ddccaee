"""What a run hands over when it has ended: ``card`` writes a model card, ``register`` fills MLflow's registry.

``served_model`` is what MLflow loads later.
"""
