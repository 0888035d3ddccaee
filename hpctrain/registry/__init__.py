"""What a run hands over when it has ended: model card and MLflow's registry."""
