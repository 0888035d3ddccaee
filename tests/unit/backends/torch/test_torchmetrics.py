"""Metrics of torchmetrics itself, over any partition into ranks: what scikit-learn says of all samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torchmetrics import classification

from hpctrain import Curve, Matrix
from hpctrain.backends.torch.torch_metrics import TorchMetricMeter
from hpctrain.tasks.meters import entries_of
from hpctrain.train.metrics import Arrays, Seen, flattened

CUTS: list[tuple[int, list[int]]] = [(8, []), (40, [15]), (41, [3, 4, 30]), (60, [0, 59])]
"""Samples, and where a rank's part ends."""


def over_ranks(metric: Any, cut: Sequence[int], outputs: np.ndarray, targets: np.ndarray, batch: int = 7) -> Any:
    """What the metric says if each rank has the samples between two cuts, in batches."""
    ends = sorted({0, len(targets), *cut})
    merged: Arrays | None = None
    meter = TorchMetricMeter(entries_of({"metric": metric})["metric"], torch.device("cpu"))
    for begin, end in [*pairwise(ends), (0, 0)]:  # the last rank has no sample
        meter.reset()
        for row in range(begin, end, batch):
            part = slice(row, min(row + batch, end))
            given = {"x": torch.zeros(0), "y": torch.from_numpy(targets[part])}
            meter.update(Seen(torch.from_numpy(outputs[part]), given, {}, np.asarray))
        mine = {name: np.array(array) for name, array in meter.state().items()}
        merged = mine if merged is None else meter.merge(merged, mine)
    assert merged is not None
    return meter.compute(merged)


def scores(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Chances with ties, and classes 0 and 1."""
    rng = np.random.default_rng(samples)
    return rng.integers(0, 9, samples).astype(np.float32) / 10, np.append([0, 1], rng.integers(0, 2, samples - 2))


@pytest.mark.parametrize(("samples", "cut"), CUTS)
def test_auc_and_curves(samples, cut):
    chances, classes = scores(samples)
    found = over_ranks(classification.BinaryAUROC(), cut, chances, classes)
    assert found == pytest.approx(sklearn.roc_auc_score(classes, chances), rel=1e-6)
    false, true, _ = sklearn.roc_curve(classes, chances, drop_intermediate=False)
    curve = over_ranks(classification.BinaryROC(), cut, chances, classes)
    assert (curve.x_label, curve.y_label) == ("false positive rate", "true positive rate")
    assert np.allclose([curve.x, curve.y], [false, true], rtol=1e-6)
    curve = over_ranks(classification.BinaryPrecisionRecallCurve(), cut, chances, classes)
    precision, recall, _ = sklearn.precision_recall_curve(classes, chances)
    assert (curve.x_label, curve.y_label) == ("recall", "precision")
    points = sorted(zip(np.round(curve.x, 6), np.round(curve.y, 6), strict=True))
    assert points == sorted(zip(np.round(recall, 6), np.round(precision, 6), strict=True))


@pytest.mark.parametrize(("samples", "cut"), CUTS)
def test_f1_and_the_confusion_matrix(samples, cut):
    rng = np.random.default_rng(samples)
    outputs, classes = rng.normal(size=(samples, 3)), np.append([0, 1, 2], rng.integers(0, 3, samples - 3))
    found = over_ranks(classification.MulticlassF1Score(3), cut, outputs, classes)
    assert found == pytest.approx(sklearn.f1_score(classes, outputs.argmax(1), average="macro"), rel=1e-6)
    counts = over_ranks(classification.MulticlassConfusionMatrix(3), cut, outputs, classes)
    wanted = sklearn.confusion_matrix(classes, outputs.argmax(1))
    assert flattened("it", counts).figures == {"it": Matrix(("0", "1", "2"), tuple(map(tuple, wanted.tolist())))}


def test_a_long_curve_is_thinned_and_keeps_its_shape():
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 2, 20_000)
    chances = 1 / (1 + np.exp(-rng.normal(size=20_000) - 3 * classes))
    curve = over_ranks(classification.BinaryROC(), [], chances, classes, batch=5000)
    assert isinstance(curve, Curve) and 100 < len(curve.x) <= 200
    assert (curve.x[0], curve.y[0], curve.x[-1], curve.y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(curve.y, curve.x) == pytest.approx(0.983, abs=0.003)
