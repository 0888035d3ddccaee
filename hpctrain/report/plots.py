"""What a report plots: curves and maps with few enough points to be seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.report.axes import time_unit
from hpctrain.report.summary import Span
from hpctrain.report.svg import Curve, Mark
from hpctrain.run import RunHistory, Series

POINTS = 400
"""Most points of one curve."""
MOST_ROWS, MOST_COLUMNS = 64, 120
"""Of a map."""
STACK_COLUMNS = 200
"""Intervals that the phase breakdown is drawn in."""


@dataclass(frozen=True)
class LinePlot:
    """One line chart with the values that it draws."""

    key: str
    """File name and anchor."""
    title: str
    x_label: str
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    from_zero: bool = False


@dataclass(frozen=True)
class StackPlot:
    """The phase breakdown."""

    key: str
    title: str
    x_label: str
    x: tuple[float, ...]
    layers: tuple[Curve, ...]


def line_plots(data: RunHistory, attempts: Sequence[Span]) -> list[LinePlot]:
    """Loss and metrics against steps and against time, learning rate, throughput."""
    begin = attempts[0].begin if attempts else 0.0
    unit, unit_name = time_unit(attempts[-1].end - begin if attempts else 0.0)
    resumes = [
        Mark(attempt.from_step, f"attempt {attempt.number} from step {attempt.from_step}") for attempt in attempts[1:]
    ]
    restarts = [Mark((attempt.begin - begin) / unit, f"attempt {attempt.number}") for attempt in attempts[1:]]
    losses = {name: data.train[name] for name in ("loss",) if name in data.train}
    if "loss" in data.metrics:
        losses["validation loss"] = data.metrics["loss"]
    losses |= {f"validation {name}": series for name, series in data.metrics.items() if name.endswith("/loss")}
    others = {name: series for name, series in data.metrics.items() if not f"/{name}".endswith("/loss")}
    wanted = [
        ("loss", "Loss", losses, False),
        ("metrics", "Validation metrics", others, False),
        ("learning_rate", "Learning rate", {k: v for k, v in data.train.items() if k == "lr"}, True),
        ("mfu", "Model FLOPs utilisation", {k: v for k, v in data.train.items() if k == "mfu"}, True),
        ("throughput", "Samples per second", {k: v for k, v in data.train.items() if k == "samples_per_s"}, True),
    ]
    plots = []
    for key, title, named, from_zero in wanted:
        if not named:
            continue
        curves = tuple(curve(name, series) for name, series in named.items())
        plots.append(LinePlot(key, title, "step", curves, tuple(resumes), from_zero))
        if key in ("loss", "metrics"):
            timed = tuple(curve(name, series, begin, unit) for name, series in named.items())
            label = f"{unit_name} since the start"
            plots.append(LinePlot(f"{key}_time", f"{title} against time", label, timed, tuple(restarts)))
    return [plot for plot in plots if any(curve.x for curve in plot.curves)]


def phase_plot(data: RunHistory) -> StackPlot | None:
    """Each phase's share of the measured time, by interval; intervals are joined if there are too many to see."""
    if not data.phases:
        return None
    steps = next(iter(data.phases.values())).step
    seconds = {name: series.value for name, series in data.phases.items() if len(series.value) == len(steps)}
    groups = np.array_split(np.arange(len(steps)), min(len(steps), STACK_COLUMNS))
    whole = [sum(float(values[group].sum()) for values in seconds.values()) or 1.0 for group in groups]
    ends = tuple(float(steps[group[-1]]) for group in groups)
    layers = []
    for name, values in sorted(seconds.items(), key=lambda item: -float(item[1].sum())):
        if values.any():
            shares = [100 * float(values[group].sum()) / total for group, total in zip(groups, whole, strict=True)]
            layers.append(Curve(name, ends, shares))
    return (
        StackPlot("phases", "Where the time goes, % of each interval", "step", ends, tuple(layers)) if layers else None
    )


def heat_maps(excess: NDArray[np.float64] | None) -> dict[str, NDArray[np.float64]]:
    """Maps in percent by title, few enough cells to be seen; none if the monitor left none."""
    return {} if excess is None else {"Busy time beyond the peers', by rank": shrink(100 * excess)}


def curve(name: str, series: Series, begin: float | None = None, unit: float = 1.0) -> Curve:
    """A series against its steps, or against the time since ``begin`` in units of ``unit`` seconds; thinned."""
    chosen = thin(series.value)
    x = series.step if begin is None else (series.time - begin) / unit
    return Curve(name, x[chosen].tolist(), series.value[chosen].tolist())


def thin(y: NDArray[np.float64], points: int = POINTS) -> NDArray[np.int64]:
    """Indices of at most ``points`` samples of a curve: each stretch's smallest and largest value, and the ends.

    Peaks and dips survive, unlike with averages or every n-th value. Values that are not finite are passed over.
    """
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= points:
        return finite
    edges = np.linspace(0, len(finite), (points - 2) // 2 + 1).astype(np.int64)
    chosen = {int(finite[0]), int(finite[-1])}
    for begin, end in itertools.pairwise(edges):
        stretch = finite[begin:end]
        chosen.add(int(stretch[np.argmin(y[stretch])]))
        chosen.add(int(stretch[np.argmax(y[stretch])]))
    return np.array(sorted(chosen), dtype=np.int64)


def shrink(values: NDArray[np.float64], rows: int = MOST_ROWS, columns: int = MOST_COLUMNS) -> NDArray[np.float64]:
    """The largest value of each block of neighbours; slow spots survive."""
    for axis, most in ((0, rows), (1, columns)):
        if values.shape[axis] > most:
            edges = np.linspace(0, values.shape[axis], most, endpoint=False).astype(np.int64)
            values = np.fmax.reduceat(values, edges, axis=axis)
    return values
