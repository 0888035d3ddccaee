"""Pipeline parallelism: ``pipeline_strategy`` is the strategy, ``stages`` divides a model.

``stage`` sends between stages, ``pipelined`` runs the passes of an update in the order of ``stage_schedule``, which
also assigns layers to stages. ``layer_times`` times layers, so that stages can be balanced.
"""
