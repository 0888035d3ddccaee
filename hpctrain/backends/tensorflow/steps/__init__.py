"""Step programs: ``loss_step`` for models with a loss, ``keras_own_step`` for a custom ``train_step``; ``passes``."""
