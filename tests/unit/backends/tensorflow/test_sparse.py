"""Rows of Keras embeddings that travel alone: which do, and that training is that of dense gradients."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

import tensorflow as tf  # noqa: E402 (after the skip)

from hpctrain.backends.tensorflow.sparse_sums import (  # noqa: E402
    Gradients,
    rows_updated_alone,
    sparse_variables,
)
from hpctrain.comm.world import alone  # noqa: E402
from hpctrain.config.sections import Config, TrainConfig  # noqa: E402
from tests.tasks.tensorflow_tasks import embedding_model, make_framework, mean_loss, train, weighted_loss  # noqa: E402

optimizers = keras.optimizers


@pytest.mark.parametrize(
    ("optimizer", "settings", "stays"),
    [
        (lambda: optimizers.SGD(0.5), {}, True),
        (lambda: optimizers.Adagrad(0.1), {}, True),
        (lambda: optimizers.SGD(0.5, momentum=0.9), {}, False),
        (lambda: optimizers.Adagrad(0.1, weight_decay=0.1), {}, False),
        (lambda: optimizers.SGD(0.5, clipnorm=1.0), {}, False),
        (lambda: optimizers.Adam(0.1), {}, False),
        (lambda: optimizers.SGD(0.5), {"compile": True}, False),
        (lambda: optimizers.SGD(0.5), {"reduce": {"sparse": "densify"}}, False),
    ],
)
def test_one_process_keeps_rows_where_the_optimizer_updates_rows_alone(optimizer, settings, stays):
    framework = make_framework(alone(), embedding_model, mean_loss, optimizer, **settings)
    assert any(framework.program.packing.is_table) is stays
    assert (framework.facts.gradient_bytes < 4 * 320_000) is stays
    framework.close()


def test_which_tables_travel_by_rows():
    def found(model, optimizer=optimizers.Adam, ranks=2, **train):
        config = Config(name="test", task="a:b", train=TrainConfig(steps=1, global_batch=1, **train))
        return [one.path for one in sparse_variables(model.trainable_variables, model, optimizer(), config, ranks)]

    def model(rows=40_000, **table):
        words = keras.Input((4,), dtype="int32")
        return keras.Model(words, keras.layers.Dense(1)(keras.layers.Embedding(rows, 8, name="table", **table)(words)))

    assert found(model()) == ["table/embeddings"], "whatever the optimizer, where there are ranks to send less to"
    assert found(model(), ranks=1) == []
    assert found(model(), optimizers.SGD, ranks=1) == ["table/embeddings"]
    assert found(model(), lambda: optimizers.SGD(loss_scale_factor=4.0), ranks=1) == [], "of a custom train_step"
    assert found(model(100)) == [], "small"
    assert found(model(embeddings_regularizer="l2")) == [], "its gradient has all rows"
    assert found(model(), compile=True) == found(model(), precision="bf16") == []
    frozen = model()
    frozen.layers[1].trainable = False
    assert found(frozen) == []


@pytest.mark.parametrize("loss", [mean_loss, weighted_loss])
@pytest.mark.parametrize("optimizer", [lambda: optimizers.SGD(0.5), lambda: optimizers.Adagrad(0.1)])
def test_training_is_that_of_dense_gradients(optimizer, loss):
    found = []
    for mode in ("auto", "densify"):
        framework = make_framework(
            alone(), embedding_model, loss, optimizer, reduce={"sparse": mode}, clip_norm=0.1, ema_decay=0.9
        )
        losses = train(framework, 6, 2)
        assert framework.program.judge.norm is not None and framework.program.judge.norm > 0.1
        found.append((losses, framework.program.judge.norm, [np.asarray(one) for one in framework.source.averages]))
        framework.close()
    (losses, norm, averages), (dense_losses, dense_norm, dense_averages) = found
    np.testing.assert_allclose(losses, dense_losses, rtol=1e-6)
    assert norm == pytest.approx(dense_norm, rel=1e-5)
    for ours, theirs in zip(averages, dense_averages, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_any_number_of_rows_is_one_trace():
    framework = make_framework(alone(), embedding_model, mean_loss, lambda: optimizers.SGD(0.5))
    train(framework, 3, 2)
    train(framework, 3)
    assert framework.program.functions.complete.experimental_get_tracing_count() == 1
    assert framework.program.functions.whole.function.experimental_get_tracing_count() == 1
    framework.close()


def test_rows_are_there_once_and_of_a_matrix_all():
    table, matrix = keras.Variable(np.zeros((6, 2))), keras.Variable(np.zeros((3,)))
    gradients = Gradients([table, matrix], [table], alone())
    slices = tf.IndexedSlices(tf.constant([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]), tf.constant([5, 1, 5]))
    packed = gradients.pack_with([slices, tf.ones((3,))], {})
    rows, pieces = gradients.apart(gradients.added(packed, gradients.added(gradients.zeros(), packed)))
    (given, ones) = gradients.unpack(rows, pieces, as_rows=True)
    assert given.indices.numpy().tolist() == [5, 1] and given.values.numpy().tolist() == [[10, 10], [4, 4]]
    assert ones.numpy().tolist() == [2, 2, 2]
    whole, _ = gradients.unpack(rows, pieces, as_rows=False)
    assert whole.numpy().tolist() == [[0, 0], [4, 4], [0, 0], [0, 0], [0, 0], [10, 10]]
    dense, _ = gradients.unpack(*gradients.apart(gradients.pack_with([whole, tf.ones((3,))], {})), as_rows=True)
    assert dense.indices.numpy().tolist() == list(range(6))


@pytest.mark.parametrize("mode", ["auto", "densify"])
def test_a_step_reads_rows_alone_of_a_table_that_it_updates_by_rows(mode):
    framework = make_framework(
        alone(), embedding_model, mean_loss, lambda: optimizers.SGD(0.5), reduce={"sparse": mode}
    )
    train(framework, 1)
    (traced,) = framework.program.passes.gradients.by_structure.values()
    (table,) = (one.value for one in framework.task.model.trainable_variables if one.shape == (40_000, 8))
    (inside,) = (inside for outside, inside in traced.graph.captures if outside is table.handle)
    assert ("ResourceGather" in {reader.type for reader in inside.consumers()}) is (mode == "auto")
    framework.close()


def apply_rows(optimizer: Any, variables: list[Any], indices: tf.Tensor, values: tf.Tensor) -> None:
    optimizer.apply([tf.IndexedSlices(values, indices, tf.constant([50, 7])), values[0]], variables)


def test_adagrad_reads_of_its_accumulator_the_rows_that_it_updates_and_finds_what_keras_finds():
    random, found = np.random.default_rng(0), []
    begin = random.normal(size=(50, 7)).astype(np.float32)
    steps = [(random.permutation(50)[:9], random.normal(size=(9, 7)).astype(np.float32)) for _ in range(4)]
    for around in (contextlib.nullcontext(), rows_updated_alone()):
        table, dense = keras.Variable(begin), keras.Variable(begin[0])
        optimizer = optimizers.Adagrad(0.3)
        optimizer.build([table, dense])
        update = tf.function(functools.partial(apply_rows, optimizer, [table, dense]))
        with around:
            for indices, values in steps:
                update(tf.constant(indices), tf.constant(values))
        found.append([np.asarray(one) for one in (table, dense, *optimizer.variables)])
        (slots,) = (one.value for one in optimizer.variables if tuple(one.shape) == (50, 7))
        graph = update.get_concrete_function(tf.constant(indices), tf.constant(values)).graph
        (inside,) = (inside for outside, inside in graph.captures if outside is slots.handle)
        readers = {reader.type for reader in inside.consumers()}
        assert ("ReadVariableOp" in readers) is (len(found) == 1), readers
    for keras_own, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-6, atol=1e-7)
