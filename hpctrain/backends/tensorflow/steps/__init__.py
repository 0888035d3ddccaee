"""Step programs: ``loss_step`` for a model with a loss, built on traced ``passes``.

``own_step`` runs a custom ``train_step``; ``compiled`` takes over what a model was compiled with.
"""
