"""Custom metrics over any partition into ranks, what they may return, and figures on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hpctrain import Curve, Matrix, Metric, UserError
from hpctrain.run.figures import Figures, read_figures, write_figures
from hpctrain.tasks.meters import MetricMeter, Selected, copy_of_metric, entries_of, require_metrics
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


class Longest:
    """A custom metric: the largest output."""

    def init(self) -> dict[str, Any]:
        return {"largest": np.array(-np.inf)}

    def update(self, state: dict[str, Any], outputs: Any, targets: Any) -> dict[str, Any]:
        return {"largest": np.maximum(state["largest"], outputs.max())}

    def merge(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        return {"largest": np.maximum(first["largest"], second["largest"])}

    def compute(self, state: dict[str, Any]) -> Any:
        return {"value": state["largest"], "pair": [1, 2]}


def test_a_metric_of_ones_own_needs_four_functions():
    assert isinstance(Longest(), Metric)
    assert flattened("own", over_ranks(Longest(), [3], np.arange(5.0), np.zeros(5))).metrics == {
        "own/value": 4,
        "own/pair/0": 1,
        "own/pair/1": 2,
    }


def test_metrics_of_training_batches_are_named_and_keep_their_own_state():
    with pytest.raises(UserError, match=r"train\.metrics has 'acc', and the task has no such metric") as caught:
        require_metrics(["accuracy", "acc"], {"accuracy": max, "auc": max})
    assert caught.value.fix == "name one of accuracy, auc"
    require_metrics(["auc"], {"accuracy": max, "auc": max})
    for name in ("loss", "lr", "steps", "grad_norm/g"):
        with pytest.raises(UserError, match=f"'{name}', which each step reports"):
            require_metrics([name], {name: max})

    class Seen:
        def __init__(self) -> None:
            self.batches: list[Any] = []

        def update(self, batch: Any) -> None:
            self.batches.append(batch)

        def compute(self) -> int:
            return len(self.batches)

    given = Seen()
    for own in (copy_of_metric(given), copy_of_metric(Selected(given, max)).metric):
        own.update(1)
        assert own.compute() == 1 and not given.compute()
    assert copy_of_metric(max) is max
    given.update(threading.Lock())
    with pytest.raises(UserError, match=r"train\.metrics: a Seen cannot be copy_of_metric"):
        copy_of_metric(given)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("0.9", None),
        ("high", "gives a str"),
        (None, "gives a NoneType"),
        (np.zeros((2, 3)), "gives an ndarray"),
        (np.zeros(101), "gives 101 numbers"),
        (Curve("x", "y", (0.0, 1.0), (0.0,)), "do not fit each other"),
        (Curve("x", "y", (0.0,), (float("nan"),)), "not finite"),
        (Matrix(("a", "b"), ((1, 2),)), "do not fit each other"),
    ],
)
def test_results_are_numbers_or_figures(result, said):
    if said is None:
        assert flattened("auc", result).metrics == {"auc": 0.9}
        return
    with pytest.raises(UserError, match=f"metrics\\['auc'\\] gives.*{said.removeprefix('gives')}"):
        flattened("auc", result)


def test_a_square_of_counts_is_a_matrix():
    assert flattened("confusion", np.eye(2)).figures == {"confusion": Matrix(("0", "1"), ((1, 0), (0, 1)))}


def test_figures_come_back_and_damaged_ones_are_left_out(tmp_path):
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
