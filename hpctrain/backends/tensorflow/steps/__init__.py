"""Step programs: ``loss_step`` for a model with a loss, ``own_step`` for a custom ``train_step``; traced ``passes``."""
