"""Keras models on their PyTorch backend: ``keras_adapter`` turns a KerasTask into a TorchTask.

``keras_module`` is its model as a module, and ``keras_optimizer`` a Keras optimizer as one of PyTorch.
"""
