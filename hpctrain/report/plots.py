"""What a report plots: curves with few enough points, for the page and for pictures alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.report.axes import time_unit
from hpctrain.report.summary import Attempt
from hpctrain.report.svg import Curve, Mark
from hpctrain.report.thinning import thin
from hpctrain.run.history import RunData, Series

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


def line_plots(data: RunData, attempts: Sequence[Attempt]) -> list[LinePlot]:
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
    others = {name: series for name, series in data.metrics.items() if name != "loss"}
    wanted = [
        ("loss", "Loss", losses, False),
        ("metrics", "Validation metrics", others, False),
        ("learning_rate", "Learning rate", {k: v for k, v in data.train.items() if k == "lr"}, True),
        ("throughput", "Samples per second", {k: v for k, v in data.train.items() if k == "samples_per_s"}, True),
    ]
    plots = []
    for key, title, named, from_zero in wanted:
        if not named:
            continue
        curves = tuple(_curve(name, series) for name, series in named.items())
        plots.append(LinePlot(key, title, "step", curves, tuple(resumes), from_zero))
        if key in ("loss", "metrics"):
            timed = tuple(_curve(name, series, begin, unit) for name, series in named.items())
            label = f"{unit_name} since the start"
            plots.append(LinePlot(f"{key}_time", f"{title} against time", label, timed, tuple(restarts)))
    return [plot for plot in plots if any(curve.x for curve in plot.curves)]


def phase_plot(data: RunData) -> StackPlot | None:
    """Each phase's share of the measured time, by interval; intervals are joined where there are too many to see."""
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


def _curve(name: str, series: Series, begin: float | None = None, unit: float = 1.0) -> Curve:
    chosen = thin(series.value)
    x = series.step if begin is None else (series.time - begin) / unit
    return Curve(name, x[chosen].tolist(), series.value[chosen].tolist())
