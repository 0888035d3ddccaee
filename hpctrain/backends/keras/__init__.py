"""What Keras' two backends share, on Keras' own API.

``keras_model`` reads models and optimizers, ``keras_compiled`` makes losses and optimizers from names and takes over
what a model was compiled with, and ``keras_meter`` merges metrics.
"""
