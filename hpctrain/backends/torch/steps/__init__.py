"""Step programs, which make updates.

``updates`` is one optimizer's part of an update, from backward passes to new weights. ``update_step`` defines step
programs, and has that of a task with a loss; ``own_step`` runs a task's own step, which calls ``step_context``.
"""
