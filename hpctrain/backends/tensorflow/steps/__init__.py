"""Programs that make an update: ``loss_step`` for a model and a loss, from compiled ``passes``.

``own_step`` runs a model's own ``train_step``; ``compiled`` is what models bring along.
"""
