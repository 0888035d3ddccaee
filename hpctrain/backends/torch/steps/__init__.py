"""Programs that make an update: ``updates`` is one optimizer's part of it, from summed gradients to new weights.

``update_step`` says what a program is, and runs the passes of a model with a loss; ``own_step`` runs a task's own
step, which calls ``step_context``.
"""
