"""What a run hands over when it has ended: ``register`` fills MLflow's registry, and writes a model card.

``served_model`` is what MLflow loads later.
"""
