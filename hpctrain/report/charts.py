"""Charts of a report: functions from numbers to charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.report.drawing import LIGHT, PALETTE, Chart, said
from hpctrain.run.figures import Plans
from hpctrain.run.grid import Grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 1e150
"""Values are clipped to this size: matplotlib cannot lay out the range between the largest floats."""
FAINT = 10.0
"""Smallest full scale of a heat map in percent, so that noise does not look like a finding."""
MOST_NAMES = 30
"""Most names or numbers along an axis of cells."""
MOST_COLUMNS, MOST_ROWS = 128, 64
"""Largest grid of ranks that is drawn; the heat map shows the ranks of larger ones."""
FAR = 3
"""Multiple of the largest plan above which the rank's memory is not drawn, since it would squeeze the bars."""
UNITS = ((2**30, "GiB"), (2**20, "MiB"))
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
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """Smallest and largest y at each x, drawn as a faint area."""


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
            if line.band:
                low, high = map(_cut, line.band)
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
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


def heat_chart(title: str, percent: NDArray[np.float64]) -> Chart:
    """A heat map of ranks by windows: orange above zero, blue below, more opaque further away; NaN is empty.

    Args:
        title: title of the chart.
        percent: float64[ranks, windows], few enough to be visible (at most about 64 x 200).
    """

    def draw(axes: Axes) -> None:
        finite = percent[np.isfinite(percent)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        _cells(axes, shades(percent))
        axes.set_xlabel(f"window ({low:.3g} to {high:.3g} %; orange: above 0, blue: below)", loc="left")
        axes.set_ylabel("rank")

    return Chart(title, draw, height=1.2 + 0.05 * min(len(percent), MOST_ROWS))


def confusion_chart(title: str, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Chart:
    """A confusion matrix of true classes (rows) and predicted ones, shaded by share of the row."""
    table = np.array(counts, dtype=np.float64)

    def draw(axes: Axes) -> None:
        shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
        shades = _tinted(np.where(np.eye(len(table)) > 0, -1.0, 1.0), 0.04 + 0.7 * shares)
        _cells(axes, shades, equal=True)
        every = -(-len(labels) // MOST_NAMES)
        places, names = range(0, len(labels), every), [said(name, 16) for name in labels[::every]]
        axes.set_yticks(places, names)
        axes.set_xticks(places, names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_xlabel("predicted", loc="left")
        axes.set_ylabel("true class")
        if len(labels) <= MOST_NAMES // 2:
            _texts(axes, [[str(count) for count in row] for row in counts])

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


def plan_chart(found: Plans, own: str | None = None) -> Chart:
    """A stacked bar of bytes for each plan.

    Args:
        found: all plans, and the memory of a rank, drawn as a line.
        own: name of the run's plan, which is marked.
    """
    plans, limit = found.plans, found.memory
    most = max(plan.total for plan in plans)
    size, unit = _unit(most)

    def draw(axes: Axes) -> None:
        kinds = [name for name in plans[0].parts if any(plan.parts[name] for plan in plans)]
        rows, done = np.arange(len(plans)), np.zeros(len(plans))
        for place, kind in enumerate(kinds):
            width = np.array([plan.parts[kind] / size for plan in plans])
            axes.barh(rows, width, 0.75, left=done, color=_colour(place), alpha=0.75, label=said(kind))
            done = done + width
        for row, whole in enumerate(done.tolist()):
            axes.annotate(f" {whole:.4g}", (whole, row), va="center", annotation_clip=False)
        axes.set_yticks(rows, [said(("▸ " if plan.name == own else "") + plan.name, 50) for plan in plans])
        axes.set_ylim(len(plans) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        label = f"{unit} per rank"
        if limit is not None:
            own_size, own_unit = _unit(limit)
            label += f"; a rank has {limit / own_size:.4g} {own_unit}"
            if limit <= FAR * most:
                axes.axvline(limit / size, linestyle="--", color=LIGHT["soft"])
        axes.margins(x=0.08)
        axes.set_xlim(left=0)
        axes.set_xlabel(label, loc="left")

    return Chart("Plans: memory per rank", draw, height=1.2 + 0.28 * len(plans))


def is_drawn(grid: Grid) -> bool:
    """Whether ranks hold different parts of a model, and few enough to be drawn."""
    return not grid.is_plain and grid.data <= MOST_COLUMNS and grid.tensor * grid.pipeline <= MOST_ROWS


def grid_chart(grid: Grid, hosts: Mapping[int, str], slowness: Sequence[float]) -> Chart:
    """A grid of ranks: columns are data indexes, rows are stages and tensor indexes; colours as in the heat map.

    Args:
        grid: places of the ranks.
        hosts: known hosts by rank.
        slowness: [ranks] percent above the peers; NaN leaves a cell empty.
    """
    count = grid.tensor * grid.pipeline

    def draw(axes: Axes) -> None:
        values = np.full((count, grid.data), np.nan)
        texts = [[""] * grid.data for _ in range(count)]
        names = [""] * count
        for rank, value in enumerate(slowness):
            place = grid.place(rank)
            row = place.stage * grid.tensor + place.tensor
            values[row, place.data] = value
            texts[row][place.data] = "\n".join(filter(None, (str(rank), said(hosts.get(rank, ""), 12))))
            parts = [f"stage {place.stage}"] if grid.pipeline > 1 else []
            names[row] = ", ".join([*parts, *([f"tensor {place.tensor}"] if grid.tensor > 1 else [])])
        _cells(axes, shades(values))
        axes.set_yticks(range(count), names)
        every = -(-grid.data // MOST_NAMES)
        axes.set_xticks(range(0, grid.data, every))
        axes.set_xlabel("data index; a cell: rank and host", loc="left")
        if grid.data <= 8:
            _texts(axes, texts)

    return Chart(f"Ranks by place: {grid}", draw, height=0.8 + 0.32 * count)


def typical(excess: NDArray[np.floating] | None, ranks: int) -> NDArray[np.float64]:
    """[ranks] each rank's median excess over the windows of an attempt, in percent; NaN if unknown.

    Args:
        excess: [ranks, windows] fractions, as the monitor saves them.
        ranks: number of ranks of the run.
    """
    found = np.full(ranks, np.nan)
    for rank, row in enumerate(excess[:ranks] if excess is not None else ()):
        known = row[np.isfinite(row)].astype(np.float64)
        found[rank] = 100 * float(np.median(known)) if known.size else np.nan
    return found


def strip(row: NDArray[np.float64], scale: float) -> str:
    """A heat map's row as text: higher blocks for larger values, a dot for values up to 0, a space for NaN."""
    heights = np.ceil(8 * np.clip(np.nan_to_num(row) / scale, 0, 1)).astype(int)
    return "".join(
        " " if not np.isfinite(value) else "·▁▂▃▄▅▆▇█"[height] for value, height in zip(row, heights, strict=True)
    )


def scale_of(values: NDArray[np.float64]) -> float:
    """The value drawn at full opacity."""
    finite = values[np.isfinite(values)]
    return max(float(np.abs(finite).max()) if finite.size else 0.0, FAINT)


def shades(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[rows, columns, 4]: colour of each cell by sign, opacity by size; NaN is transparent."""
    known = np.isfinite(values)
    opacity = np.where(known, 0.05 + 0.95 * np.abs(np.where(known, values, 0)) / scale_of(values), 0)
    return _tinted(values, opacity)


def _tinted(signs: NDArray[np.float64], opacity: NDArray[np.float64]) -> NDArray[np.float64]:
    above, below = (np.array([int(LIGHT[name][at : at + 2], 16) / 255 for at in (1, 3, 5)]) for name in ("c1", "c0"))
    return np.concatenate([np.where((signs > 0)[..., None], above, below), opacity[..., None]], axis=-1)


def _cells(axes: Axes, shades: NDArray[np.float64], equal: bool = False) -> None:
    axes.imshow(shades, aspect="equal" if equal else "auto", interpolation="none")
    axes.grid(visible=False)


def _texts(axes: Axes, texts: Sequence[Sequence[str]]) -> None:
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            axes.text(column, row, text, ha="center", va="center", fontsize=7)


def _colour(number: int) -> str:
    return LIGHT[PALETTE[number % len(PALETTE)]]


def _cut(values: Sequence[float]) -> NDArray[np.float64]:
    return np.clip(np.asarray(values, dtype=np.float64), -LARGEST, LARGEST)


def _unit(num_bytes: int) -> tuple[int, str]:
    return next((one for one in UNITS if num_bytes >= 10 * one[0]), UNITS[-1])
