"""Rows of Keras embeddings that travel alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from hpctrain.comm.world import alone  # noqa: E402 (after the skip)
from tests.support.tensorflow_tasks import embedding_model, make_framework, mean_loss, train, weighted_loss  # noqa: E402


@pytest.mark.parametrize(
    ("optimizer", "settings", "stays"),
    [
        (lambda: keras.optimizers.SGD(0.5), {}, True),
        (lambda: keras.optimizers.Adagrad(0.1), {}, True),
        (lambda: keras.optimizers.SGD(0.5, momentum=0.9), {}, False),
        (lambda: keras.optimizers.Adagrad(0.1, weight_decay=0.1), {}, False),
        (lambda: keras.optimizers.Adam(0.1), {}, False),
        (lambda: keras.optimizers.SGD(0.5), {"compile": True}, False),
    ],
)
def test_rows_stay_alone_where_that_changes_no_number(
    optimizer: Callable[[], Any], settings: dict[str, Any], stays: bool
) -> None:
    framework = make_framework(alone(), model=embedding_model, optimizer=optimizer, **settings)
    assert any(framework.sorted_out.is_table) is stays
    framework.close()


@pytest.mark.parametrize("loss", [mean_loss, weighted_loss])
@pytest.mark.parametrize("optimizer", [lambda: keras.optimizers.SGD(0.5), lambda: keras.optimizers.Adagrad(0.1)])
def test_training_is_that_of_dense_gradients(optimizer: Callable[[], Any], loss: Any) -> None:
    found = []
    for mode in ("auto", "densify"):
        framework = make_framework(
            alone(), embedding_model, loss, optimizer, reduce={"sparse": mode}, clip_norm=0.1, ema_decay=0.9
        )
        losses = train(framework, 6, 2)
        found.append([*losses, framework.judge.norm, *(float(np.sum(np.asarray(one))) for one in framework.averages)])
        framework.close()
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
