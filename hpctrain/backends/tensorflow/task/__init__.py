"""From a Keras task to a model that is equal on all ranks: ``opening``, and a ``dry_call`` of it.

``dataset`` reads tf.data pipelines. ``holdings`` finds what state a task keeps; ``overrides`` says what a model's class
defines itself, and listens to what its steps call. ``sync_batchnorm`` normalises over all ranks. ``by_name`` has losses
and optimizers that a task or run file names.
"""
