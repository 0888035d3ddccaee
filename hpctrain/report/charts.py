"""Charts of a report: functions from numbers to charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpctrain.report.drawing import LIGHT, PALETTE, Chart, said
from hpctrain.system.array_types import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 1e150
"""Values are clipped to this size: matplotlib cannot lay out the range between the largest floats."""
FAINT = 20.0
"""Smallest full scale of a heat map in percent, so that noise does not look like a finding."""
PALE = 1.4
"""Full scale of shares, so that numbers on them can be read."""
MOST_NAMES = 30
"""Most names or numbers along an axis of cells."""
TALLEST = 64
"""Most rows that add to a heat map's height."""
Look = Literal["line", "dotted", "dashed", "points", "rings"]
STYLES: dict[Look, dict[str, object]] = {
    "line": {},
    "dotted": {"linestyle": ":"},
    "dashed": {"linestyle": "--"},
    "points": {"linestyle": "", "marker": "o", "markersize": 4},
    "rings": {"linestyle": "", "marker": "o", "markersize": 5, "markerfacecolor": "none"},
}


@dataclass(frozen=True)
class ChartLine:
    """A named line or set of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look = "line"
    colour: int | None = None
    """Index into the palette; by default the line's place."""


@dataclass(frozen=True)
class Bar:
    """A bar on a time line, in its own row."""

    name: str
    """Text above the bar."""
    begin: float
    end: float
    is_good: bool


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    x_label: str,
    marks: Mapping[float, str] | None = None,
    from_zero: bool = False,
    log_y: bool = False,
    sizes: Sequence[int] = (),
) -> Chart:
    """A chart of lines over the same axes.

    Args:
        title: title of the chart.
        lines: at least one line.
        x_label: label of the x axis, with its unit.
        marks: names of vertical lines by x; the legend shows only the first.
        from_zero: whether the y axis includes 0.
        log_y: whether the y axis is logarithmic.
        sizes: ticks of a logarithmic x axis, such as numbers of ranks; without them it is linear.
    """

    def draw(axes: Axes) -> None:
        for place, line in enumerate(lines):
            colour = _colour(place if line.colour is None else line.colour)
            x, y = _cut(line.x), _cut(line.y)
            style = STYLES["points"] if len(x) == 1 and line.look == "line" else STYLES[line.look]
            axes.plot(x, y, color=colour, label=said(line.name), **style)  # type: ignore[arg-type]
        begin, end = axes.get_xlim()
        for place, (at, name) in enumerate((marks or {}).items()):
            if begin <= at <= end:
                style = {"linestyle": "--", "linewidth": 0.8, "color": LIGHT["soft"]}
                axes.axvline(at, label=said(name) if not place else None, **style)  # type: ignore[arg-type]
        axes.set_xlabel(said(x_label), loc="left")
        if log_y:
            from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        elif from_zero:
            bottom, top = axes.get_ylim()
            axes.set_ylim(min(bottom, 0) if min(map(min, (line.y for line in lines))) < 0 else 0, max(top, 0))
        if sizes:
            axes.set_xscale("log")
            axes.set_xticks(sizes, list(map(str, sizes)))
            axes.minorticks_off()

    return Chart(title, draw)


def stack_chart(title: str, steps: Sequence[float], layers: Sequence[ChartLine]) -> Chart:
    """A stacked area chart over steps; each layer's ``y`` is its thickness."""

    def draw(axes: Axes) -> None:
        colours = [_colour(place) for place in range(len(layers))]
        names = [said(layer.name) for layer in layers]
        axes.stackplot(steps, *(layer.y for layer in layers), labels=names, colors=colours, alpha=0.75)
        axes.set_xlabel("step", loc="left")
        axes.margins(x=0, y=0)

    return Chart(title, draw)


def heat_chart(title: str, percent: Floats) -> Chart:
    """A heat map of ranks by windows: orange above zero, blue below, more opaque further away; NaN is empty.

    Args:
        title: title of the chart.
        percent: float64[ranks, windows], few enough to be visible (at most about 64 x 200).
    """

    def draw(axes: Axes) -> None:
        finite = percent[np.isfinite(percent)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        _cells(axes, percent, max(high, -low, FAINT), "auto")
        axes.set_xlabel(f"window; orange: longer, blue: shorter ({low:.0f}% to {high:+.0f}%)", loc="left")
        axes.set_ylabel("rank")

    return Chart(title, draw, height=1.2 + 0.05 * min(len(percent), TALLEST))


def confusion_chart(title: str, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Chart:
    """A confusion matrix of true classes (rows) and predicted ones, shaded by share of the row."""
    table = np.array(counts, dtype=np.float64)

    def draw(axes: Axes) -> None:
        shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
        _cells(axes, np.where(np.eye(len(table)) > 0, -shares, shares), PALE, "equal")
        every = -(-len(labels) // MOST_NAMES)
        places = range(0, len(labels), every)
        names = [said(name, 16) for name in labels[::every]]
        axes.set_yticks(places, names)
        axes.set_xticks(places, names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_xlabel("predicted", loc="left")
        axes.set_ylabel("true class")
        if len(labels) <= MOST_NAMES // 2:
            for (row, column), count in np.ndenumerate(np.array(counts)):
                axes.text(column, row, str(count), ha="center", va="center", fontsize=7)

    return Chart(title, draw, height=min(5.0, 1.4 + 0.3 * len(labels)))


def time_chart(title: str, bars: Sequence[Bar], x_label: str) -> Chart:
    """A time line of bars, one per row, each with its name above it."""

    def draw(axes: Axes) -> None:
        whole = max(bar.end for bar in bars) - min(bar.begin for bar in bars)
        for row, bar in enumerate(bars):
            colour = LIGHT["c2" if bar.is_good else "c4"]
            axes.barh(row, max(bar.end - bar.begin, whole / 400), 0.35, left=bar.begin, color=colour, alpha=0.75)
            place = axes.get_yaxis_transform()
            axes.annotate(said(bar.name, 88), (0, row - 0.22), xycoords=place, va="bottom", annotation_clip=False)
        axes.set_ylim(len(bars) - 0.5, -0.7)
        axes.set_yticks([])
        axes.set_xlabel(said(x_label), loc="left")

    return Chart(title, draw, height=0.8 + 0.5 * len(bars))


def _cells(axes: Axes, values: Floats, full: float, aspect: Literal["equal", "auto"]) -> None:
    """Colours each cell by its sign, more opaque towards ``full`` or ``-full``; NaN is transparent."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    below, above = LIGHT["c0"], LIGHT["c1"]
    colours = [(0, to_rgba(below)), (0.5, to_rgba(below, 0.05)), (0.5, to_rgba(above, 0.05)), (1, to_rgba(above))]
    shades = LinearSegmentedColormap.from_list("shades", colours)
    axes.imshow(values, shades, vmin=-full, vmax=full, aspect=aspect, interpolation="none")
    axes.grid(visible=False)


def _colour(number: int) -> str:
    return LIGHT[PALETTE[number % len(PALETTE)]]


def _cut(values: Sequence[float]) -> Floats:
    return np.clip(np.asarray(values, dtype=np.float64), -LARGEST, LARGEST)
