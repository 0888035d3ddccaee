"""Keras on TensorFlow: ``keras_framework`` trains and evaluates a model; ``runtime`` prepares making it.

``task`` opens a task, ``steps`` make updates, and ``state`` names variables.
``keras_reducer`` sums gradients in pieces, and ``sparse_sums`` those of embedding tables by rows.
``keras_performance`` counts operations and profiles, and ``keras_bench_models`` has the models of hpctrain.bench.
"""
