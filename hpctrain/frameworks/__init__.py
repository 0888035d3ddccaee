"""One update, evaluation and state of a model, in PyTorch and in TensorFlow."""
