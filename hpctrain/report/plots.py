"""Chooses what a report plots, and thins lines and maps to a visible number of points."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpctrain.report import charts
from hpctrain.report.drawing import Chart
from hpctrain.report.summary import Span
from hpctrain.run.events import Train
from hpctrain.run.history import RunHistory, Series
from hpctrain.system.array_types import Floats, Ints
from hpctrain.system.quantities import VISIBLE_MFU

POINTS = 400
"""Most points of a curve."""
MOST_ROWS, MOST_COLUMNS = 64, 120
"""Largest heat map."""
WIDE = 20
"""Ratio of the largest loss to the smallest above which losses are drawn on a logarithmic scale."""
STACK_COLUMNS = 200
"""Most intervals in the phase breakdown."""


@dataclass(frozen=True)
class ReportSection:
    """A chart and the table behind it."""

    key: str
    """Anchor in the page, and name of the SVG file."""
    chart: Chart
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


def line_section(
    key: str,
    title: str,
    lines: Sequence[charts.ChartLine],
    x_label: str = "step",
    marks: Mapping[float, str] | None = None,
    from_zero: bool = False,
) -> ReportSection:
    """A line chart and its table; see ``charts.line_chart``."""
    rows = [(line.name, x, y) for line in lines for x, y in zip(line.x, line.y, strict=True)]
    values = [y for line in lines for y in line.y]
    is_wide = key.startswith("loss") and values and 0 < WIDE * min(values) < max(values)
    chart = charts.line_chart(title, lines, x_label, marks, from_zero, log_y=bool(is_wide))
    return ReportSection(key, chart, ("curve", x_label, "value"), rows)


def line_sections(data: RunHistory, attempts: Sequence[Span]) -> list[ReportSection]:
    """Loss and metrics by step and by time, learning rate, MFU and throughput."""
    begin = attempts[0].begin if attempts else 0.0
    unit, unit_name = time_unit(attempts[-1].end - begin if attempts else 0.0)
    resumes: dict[float, str] = dict.fromkeys((attempt.from_step for attempt in attempts[1:]), "resumed")
    restarts = dict.fromkeys(((attempt.begin - begin) / unit for attempt in attempts[1:]), "next attempt")
    train, metrics = data.train, data.metrics
    losses = {"loss": train.get("loss"), "validation loss": metrics.get("loss")}
    losses |= {f"validation {name}": series for name, series in metrics.items() if name.endswith("/loss")}
    others = {name: series for name, series in metrics.items() if not f"/{name}".endswith("/loss")}
    trained = {f"training {name}": series for name, series in train.items() if name not in Train.MEASURED}
    rate, rate_title = train.get("learning_rate"), "Learning rate"
    if rate is None:
        rate, rate_title = train.get("lr"), "Learning rate, as a factor"
    wanted: list[tuple[str, str, Mapping[str, Series | None], bool]] = [
        ("loss", "Loss", losses, False),
        ("metrics", "Validation metrics", others, False),
        ("training_metrics", "Training metrics", trained, False),
        ("learning_rate", rate_title, {"learning rate": rate}, True),
        ("mfu", "Model FLOPs utilisation, %", {"MFU (%)": utilisation(data)}, True),
        ("throughput", "Samples per second", {"samples per second": train.get("samples_per_s")}, True),
        ("tokens", "Tokens per second", {"tokens per second": train.get("tokens_per_s")}, True),
    ]
    sections = []
    for key, title, named, from_zero in wanted:
        known = [(name, series) for name, series in named.items() if series is not None]
        lines = [line_of(name, series) for name, series in known]
        if not any(line.x for line in lines):
            continue
        sections.append(line_section(key, title, lines, marks=resumes, from_zero=from_zero))
        if key in ("loss", "metrics"):
            timed = [line_of(name, series, begin, unit) for name, series in known]
            label = f"{unit_name} since the start"
            sections.append(line_section(f"{key}_time", f"{title} against time", timed, label, restarts))
    return sections


def utilisation(data: RunHistory) -> Series | None:
    """The MFU in percent; None if it is unknown or says nothing: of a short run, or always below VISIBLE_MFU."""
    mfu = data.train.get("mfu")
    if mfu is None or data.run.account.is_short or not np.any(mfu.value >= VISIBLE_MFU):
        return None
    return replace(mfu, value=100 * mfu.value)


def phase_section(data: RunHistory) -> ReportSection | None:
    """Each phase's share of the measured time by interval; merges intervals if there are too many."""
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
            layers.append(charts.ChartLine(name, ends, shares))
    if not layers:
        return None
    chart = charts.stack_chart("Where the time goes, % of each interval", ends, layers)
    rows = [(x, *(layer.y[index] for layer in layers)) for index, x in enumerate(ends)]
    return ReportSection("phases", chart, ("step", *(f"{layer.name} (%)" for layer in layers)), rows)


def time_unit(seconds: float) -> tuple[float, str]:
    """A unit that suits a span of time: its length in seconds and its name."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds > 2 * size:
            return size, name
    return 1.0, "seconds"


def line_of(name: str, series: Series, begin: float | None = None, unit: float = 1.0) -> charts.ChartLine:
    """A thinned line of a series by step, or by time since ``begin`` in units of ``unit`` seconds."""
    chosen = thin(series.value)
    x = series.step if begin is None else (series.time - begin) / unit
    return charts.ChartLine(name, x[chosen].tolist(), series.value[chosen].tolist())


def thin(y: Floats, points: int = POINTS) -> Ints:
    """Indices of at most ``points`` values of a curve: the smallest and largest of each stretch, and the ends.

    Peaks and dips survive, unlike with averages or every n-th value. Non-finite values are skipped.
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


def shrink(values: Floats, rows: int = MOST_ROWS, columns: int = MOST_COLUMNS) -> Floats:
    """Reduces a map to the maximum of each block, so that slow spots survive."""
    for axis, most in ((0, rows), (1, columns)):
        if values.shape[axis] > most:
            edges = np.linspace(0, values.shape[axis], most, endpoint=False).astype(np.int64)
            values = np.fmax.reduceat(values, edges, axis=axis)
    return values
