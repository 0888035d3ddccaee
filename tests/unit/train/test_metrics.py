"""Ready-made metrics against scikit-learn's on all samples at once, over any partition into ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sklearn

from hpctrain import AUC, F1, ConfusionMatrix, Curve, Matrix, Metric, PrecisionRecallCurve, RocCurve, UserError
from hpctrain.run.figures import Figures, read_figures, write_figures
from hpctrain.tasks.meters import MetricMeter, entries_of
from hpctrain.train.metrics import Arrays, Seen, flattened


def over_ranks(metric: Any, cut: Sequence[int], *arrays: np.ndarray, batch: int = 7) -> Any:
    """What the metric says if each rank has the samples between two cuts, in batches."""
    ends = sorted({0, len(arrays[0]), *(each for each in cut if each < len(arrays[0]))})
    parts = [range(begin, end) for begin, end in pairwise(ends)]
    merged: Arrays | None = None
    (entry,) = entries_of({"metric": metric}).values()
    meter = MetricMeter(entry)
    for part in [*parts, range(0)]:  # the last rank has no sample
        meter.reset()
        for begin in range(part.start, part.stop, batch):
            rows = slice(begin, min(begin + batch, part.stop))
            outputs, targets = (array[rows] for array in arrays)
            given = {"x": outputs, "y": targets}
            meter.update(Seen(outputs, given, given, lambda one: one))
        mine = {name: np.array(array) for name, array in meter.state().items()}
        merged = mine if merged is None else meter.merge(merged, mine)
    assert merged is not None
    return meter.compute(merged)


@pytest.mark.parametrize(
    ("n", "levels", "cut"),
    [(2, 2, [1]), (40, 2, []), (41, 5, [20]), (43, 1000, [3, 4, 30]), (60, 5, [1, 2, 59]), (59, 1000, [0, 50])],
)
def test_auc_and_curves_are_scikit_learns(n: int, levels: int, cut: list[int]) -> None:
    rng = np.random.default_rng(n)
    scores = (rng.integers(0, levels, n) / levels).astype(np.float32)  # with ties
    classes = np.append([0, 1], rng.integers(0, 2, n - 2))
    assert over_ranks(AUC(), cut, scores, classes) == pytest.approx(sklearn.roc_auc_score(classes, scores), abs=1e-12)
    false, true, _ = sklearn.roc_curve(classes, scores, drop_intermediate=False)
    curve = over_ranks(RocCurve(), cut, scores, classes)
    assert np.allclose([curve.x, curve.y], [false, true], rtol=1e-12)
    precision, recall, _ = sklearn.precision_recall_curve(classes, scores)
    curve = over_ranks(PrecisionRecallCurve(), cut, scores, classes)
    assert np.allclose([curve.x[::-1], curve.y[::-1]], [recall, precision], rtol=1e-12)


def test_a_long_curve_is_thinned_and_keeps_its_shape() -> None:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 2, 20_000)
    curve = over_ranks(RocCurve(), [], rng.normal(size=20_000) + 3 * classes, classes, batch=5000)
    assert len(curve.x) <= 201 and (curve.x[0], curve.y[0], curve.x[-1], curve.y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(curve.y, curve.x) == pytest.approx(0.983, abs=0.003)


@pytest.mark.parametrize(
    ("n", "num_classes", "cut"), [(1, 2, []), (3, 5, [1, 2]), (40, 2, [15]), (41, 3, [3, 4, 30]), (60, 5, [0, 59])]
)
def test_f1_and_confusion_are_scikit_learns(n: int, num_classes: int, cut: list[int]) -> None:
    rng = np.random.default_rng(n)
    outputs, classes = rng.normal(size=(n, num_classes)), rng.integers(0, num_classes, n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn, about classes that no one has
        for average in ("macro", "micro") if num_classes > 2 else ("binary", "macro", "micro"):
            wanted = sklearn.f1_score(classes, outputs.argmax(1), average=average)
            assert over_ranks(F1(average), cut, outputs, classes) == pytest.approx(wanted, abs=1e-12)
        labels = list(range(num_classes))
        counts = sklearn.confusion_matrix(classes, outputs.argmax(1), labels=labels)
    named = over_ranks(ConfusionMatrix([f"class {label}" for label in labels]), cut, outputs, classes)
    assert named.counts == tuple(map(tuple, counts.tolist()))


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (np.array([0.2, 0.7, 0.6]), np.array([0, 1, 0])),
        (np.array([[0.2], [0.7], [0.6]]), np.array([0, 1, 0])),
        (np.array([False, True, True]), np.array([[0], [1], [0]])),
        (np.array([[2.0, 1], [1, 2], [1, 2]]), np.array([[0], [1], [0]])),
        (np.array([[[2.0, 1, 1], [1, 2, 2]]]), np.array([[0, 1, 0]])),  # classes behind the samples, as in torch
    ],
)
def test_f1_decides_by_threshold_or_by_the_largest_output(outputs: np.ndarray, targets: np.ndarray) -> None:
    assert over_ranks(F1(), [], outputs, targets) == pytest.approx(2 / 3)


def test_what_no_metric_can_judge_is_nan() -> None:
    one_class = np.zeros(4, int)
    assert np.isnan(over_ranks(AUC(), [2], np.arange(4.0), one_class))
    assert np.isnan(over_ranks(RocCurve(), [2], np.arange(4.0), one_class))
    assert np.isnan(over_ranks(PrecisionRecallCurve(), [2], np.arange(4.0), one_class))
    assert np.isnan(over_ranks(AUC(), [], np.array([0.1, np.nan]), np.array([0, 1])))
    assert over_ranks(F1(), [], np.zeros(4), one_class) == 0


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "said"),
    [
        (AUC(), np.zeros((3, 2)), np.zeros(3), "not a score and a class"),
        (AUC(), np.zeros(3), np.array([0, 1, 2]), "gets the classes 0, 1, 2"),
        (F1(), np.zeros((3, 3)), np.array([0, 1, 2]), "binary and gets class 2"),
        (F1("macro"), np.zeros((3, 2)), np.array([0, 1, -100]), "a target is -100"),
        (F1(), np.zeros((3, 2)), np.zeros((3, 4)), "do not go together"),
        (F1(), np.zeros((3, 3, 3)), np.zeros((3, 3)), "do not go together"),
        (ConfusionMatrix(["cat"]), np.zeros((3, 3)), np.array([0, 1, 2]), "has names for 1 classes"),
        (ConfusionMatrix(), np.zeros(1), np.array([200]), "shows at most 200 classes"),
    ],
)
def test_arrays_that_do_not_fit_are_told_with_the_metrics_name(
    metric: Any, outputs: Any, targets: Any, said: str
) -> None:
    with pytest.raises(UserError, match="metrics\\['metric'\\]: .*" + said) as caught:
        over_ranks(metric, [], outputs, targets)
    assert caught.value.fix


def test_an_unknown_average_is_refused() -> None:
    with pytest.raises(UserError, match="'weighted'"):
        F1("weighted")  # type: ignore[arg-type]


class Longest:
    """A metric of a user's own: the largest output, and how often each was seen."""

    def init(self) -> dict[str, Any]:
        return {"largest": np.array(-np.inf)}

    def update(self, state: dict[str, Any], outputs: Any, targets: Any) -> dict[str, Any]:
        return {"largest": np.maximum(state["largest"], outputs.max())}

    def merge(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        return {"largest": np.maximum(first["largest"], second["largest"])}

    def compute(self, state: dict[str, Any]) -> Any:
        return {"value": state["largest"], "pair": [1, 2]}


def test_a_metric_of_ones_own_needs_four_functions() -> None:
    assert isinstance(Longest(), Metric)
    assert flattened("own", over_ranks(Longest(), [3], np.arange(5.0), np.zeros(5))).metrics == {
        "own/value": 4,
        "own/pair/0": 1,
        "own/pair/1": 2,
    }


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("0.9", None),
        ("high", "gives a str"),
        (None, "gives a NoneType"),
        (np.zeros((2, 3)), "gives a ndarray"),
        (np.zeros(101), "gives 101 numbers"),
        (Curve("x", "y", (0.0, 1.0), (0.0,)), "do not fit each other"),
        (Curve("x", "y", (0.0,), (float("nan"),)), "not finite"),
        (Matrix(("a", "b"), ((1, 2),)), "do not fit each other"),
    ],
)
def test_results_are_numbers_or_figures(result: Any, said: str | None) -> None:
    if said is None:
        assert flattened("auc", result).metrics == {"auc": 0.9}
        return
    with pytest.raises(UserError, match=f"metrics\\['auc'\\] gives.*{said.removeprefix('gives')}"):
        flattened("auc", result)


def test_a_square_of_counts_is_a_matrix() -> None:
    assert flattened("confusion", np.eye(2)).figures == {"confusion": Matrix(("0", "1"), ((1, 0), (0, 1)))}


def test_figures_come_back_and_damaged_ones_are_left_out(tmp_path: Any) -> None:
    path = tmp_path / "figures.json"
    assert read_figures(path) is None
    found = Figures(7, {"roc": Curve("a", "b", (0.0, 1.0), (0.0, 1.0)), "dev/m": Matrix(("0",), ((3,),))})
    write_figures(path, found, tmp_path)
    assert read_figures(path) == found
    text = path.read_text()
    damages: list[Callable[[str], str]] = [
        lambda text: text[:-5],
        lambda text: text.replace('"step": 7', '"step": "7"'),
        lambda text: "[]",
        lambda text: '{"step": 7}',
    ]
    for damage in damages:
        path.write_text(damage(text))
        assert read_figures(path) is None
    path.write_text(text.replace('"x": [0.0, 1.0]', '"x": [0.0]').replace("3", "4"))
    assert read_figures(path) == Figures(7, {"dev/m": Matrix(("0",), ((4,),))})
