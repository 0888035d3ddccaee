"""Turns a Keras task into a framework with equal models on all ranks: ``opening``; ``dry_call`` tries it.

``dataset`` reads tf.data pipelines. ``holdings`` finds state that a task keeps outside its model; ``overrides`` detects
custom steps of a model's class and intercepts their updates. ``sync_batchnorm`` normalises over all ranks. ``compiled``
makes losses and optimizers from names, and takes over what a model was compiled with.
"""
