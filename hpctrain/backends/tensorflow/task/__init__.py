"""Turns a Keras task into a framework with equal models on all ranks: ``keras_opening``; ``dry_call`` tries it.

``keras_task_state`` finds state that a task keeps outside its model;
``overrides`` detects custom steps of a model's class and intercepts their updates. ``keras_sync_batchnorm`` normalises
over all ranks. ``keras_compiled`` makes losses and optimizers from names, and takes over what a model was compiled
with.
"""
