"""Pipeline parallelism: ``strategy`` is the strategy, ``stages`` divides a model, ``stage`` sends between stages.

``pipelined`` runs the passes of an update. ``layer_times`` times layers, so that stages can be balanced.
"""
