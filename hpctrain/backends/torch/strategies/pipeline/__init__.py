"""Layers in stages, as ``strategy`` assigns them: ``stages`` finds and keeps them, ``stage`` talks to its neighbours.

``pipelined`` runs the passes of an update. ``layer_times`` measures layers, so that stages take equally long.
"""
