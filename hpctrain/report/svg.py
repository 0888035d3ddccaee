"""Charts as SVG: pure functions from numbers to text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from hpctrain.report.axes import Axis, label, make_axis, make_log_axis
from hpctrain.report.chart import WIDTH, Chart, Key, Look

HEIGHT = 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 34
FAINT = 10.0
"""Full scale of a heat map whose values are smaller: noise must not look like a finding."""
SPAN_HEIGHT = 40
"""Of a bar on a time line with the line of text above it."""
NAME_LENGTH = 110
"""Characters of that text that fit."""
NAMES, NAME, ROOM, LETTER = 120, 16, 16, 6.5
"""Of a confusion matrix: pixels for names beside it, characters of one, pixels of a line of text, and of a letter."""


@dataclass(frozen=True)
class Curve:
    """A named line, or points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look = "line"
    colour: int | None = None
    """0 to 7; by default by the place among the curves."""
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """Smallest and largest y at each x, as a faint area."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at an x, such as a resume."""

    x: float
    name: str


@dataclass(frozen=True)
class Span:
    """A bar on a time line, in a row of its own."""

    name: str
    """Stands above it."""
    begin: float
    end: float
    kind: str
    """CSS class."""


def lines(
    title: str,
    curves: Sequence[Curve],
    x_label: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    log_y: bool = False,
    sizes: Sequence[int] = (),
) -> Chart:
    """A line chart.

    Args:
        title: above it.
        curves: at least one.
        x_label: what x is, with its unit.
        marks: vertical lines.
        from_zero: the y axis holds 0.
        log_y: the y axis is logarithmic.
        sizes: ticks of a logarithmic x axis, such as numbers of ranks; without them it is linear.
    """
    xs = [x for curve in curves for x in curve.x]
    ys = [y for curve in curves for each in (curve.y, *(curve.band or ())) for y in each]
    x_axis = make_axis(xs, LEFT, WIDTH - RIGHT)
    if sizes:
        low, high = min(sizes) / 1.15, max(sizes) * 1.15
        x_axis = Axis(low, high, LEFT, WIDTH - RIGHT, tuple(map(float, sizes)), log=True)
    bottom = HEIGHT - BOTTOM
    y_axis = make_log_axis(ys, bottom, TOP) if log_y else make_axis(ys, bottom, TOP, from_zero)
    body = [*_grid(x_axis, y_axis), _x_label(x_label)]
    colours = [index % 8 if curve.colour is None else curve.colour for index, curve in enumerate(curves)]
    for curve, colour in zip(curves, colours, strict=True):
        body.append(_curve(curve, colour, x_axis, y_axis))
    for mark in (mark for mark in marks if x_axis.low <= mark.x <= x_axis.high):
        x = x_axis.pixel(mark.x)
        body.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
            f"<title>{escape(mark.name)}</title></line>"
        )
    legend = tuple(Key(curve.name, colour, curve.look) for curve, colour in zip(curves, colours, strict=True))
    return Chart(title, HEIGHT, "".join(body), f"{_range('x', x_axis)} {_range('y', y_axis)}", legend)


def stacked(title: str, x: Sequence[float], layers: Sequence[Curve], x_label: str) -> Chart:
    """Layers on top of each other, each over the same ``x``; every layer's ``y`` is its own thickness."""
    total = np.sum([layer.y for layer in layers], axis=0) if layers else np.zeros(0)
    x_axis = make_axis(x, LEFT, WIDTH - RIGHT)
    y_axis = make_axis(total.tolist(), HEIGHT - BOTTOM, TOP, from_zero=True)
    body = [*_grid(x_axis, y_axis), _x_label(x_label)]
    base = np.zeros(len(x))
    for index, layer in enumerate(layers):
        top = base + np.asarray(layer.y)
        name, points = escape(layer.name), _between(x, base.tolist(), top.tolist(), x_axis, y_axis)
        body.append(
            f'<polygon class="area c{index % 8}" data-name="{name}" points="{points}"><title>{name}</title></polygon>'
        )
        base = top
    return Chart(
        title,
        HEIGHT,
        "".join(body),
        legend=tuple(Key(each.name, index % 8, "area") for index, each in enumerate(layers)),
    )


def heat_map(title: str, values: NDArray[np.float64], x_label: str, y_label: str, unit: str) -> Chart:
    """Rows of cells in one colour above zero and another one below, the stronger the further away; NaN stays empty.

    Each cell carries its value, to two decimals, and the drawing the range, in ``data-`` attributes.

    Args:
        title: above it.
        values: float64[rows, columns], already small enough to be seen (at most about 64 x 200).
        x_label: what columns are.
        y_label: what rows are.
        unit: of the values.
    """
    rows, columns = values.shape
    height = TOP + BOTTOM + max(rows * max(4, min(18, 320 // max(rows, 1))), 40)
    width, tall = (WIDTH - LEFT - RIGHT) / max(columns, 1), (height - TOP - BOTTOM) / max(rows, 1)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    scale = max(abs(low), abs(high), FAINT)
    body = [_x_label(x_label, height), f'<text class="tick" x="4" y="{TOP + 10}">{escape(y_label)}</text>']
    for row in range(rows):
        y = TOP + row * tall
        if row % max(1, rows // 16) == 0:
            body.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + tall / 2 + 3:.1f}">{row}</text>')
        for column in range(columns):
            if np.isfinite(value := values[row, column]):
                side = "above" if value > 0 else "below"
                body.append(
                    f'<rect class="cell {side}" x="{LEFT + column * width:.1f}" y="{y:.1f}" '
                    f'width="{width:.2f}" height="{tall:.1f}" fill-opacity="{0.05 + 0.95 * abs(value) / scale:.2f}" '
                    f'data-value="{value:.2f}"/>'
                )
    legend = f"{low:.3g} to {high:.3g} {escape(unit)}; orange: above 0, blue: below"
    body.append(f'<text class="tick end" x="{WIDTH - RIGHT}" y="{height - 6}">{legend}</text>')
    return Chart(title, height, "".join(body), f'data-z="{low:.17g} {high:.17g}"')


def confusion(title: str, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Chart:
    """Counts of true classes (rows) against predicted ones; the darker, the larger the part of its row.

    Each cell carries its count in a ``data-`` attribute; it is written there if it fits.
    """
    size = len(labels)
    side = min(40.0, (WIDTH - NAMES - RIGHT) / size)
    every = max(1, math.ceil(ROOM / side))
    height = TOP + BOTTOM + ROOM + size * side
    body = [_x_label("rows: true classes; columns: predicted", height)]
    for row, name in enumerate(labels):
        y, whole = TOP + ROOM + row * side, sum(counts[row]) or 1
        if row % every == 0:
            short = escape(name if len(name) <= NAME else name[: NAME - 1] + "…")
            body.append(f'<text class="tick end" x="{NAMES - 6}" y="{y + side / 2 + 4:.1f}">{short}</text>')
            place = NAMES + (row + 0.5) * side
            short = escape(name if len(name) * LETTER <= side * every else str(row))
            body.append(f'<text class="tick middle" x="{place:.1f}" y="{TOP + ROOM - 4}">{short}</text>')
        for column, count in enumerate(counts[row]):
            x, told = NAMES + column * side, f"{name} taken for {labels[column]}: {count}"
            colour, share = "below" if row == column else "above", count / whole
            body.append(
                f'<rect class="cell {colour}" x="{x:.1f}" y="{y:.1f}" width="{side:.2f}" height="{side:.2f}" '
                f'fill-opacity="{0.04 + 0.7 * share:.2f}" data-value="{count}"><title>{escape(told)}</title></rect>'
            )
            if len(str(count)) * LETTER <= side and side >= ROOM:
                body.append(
                    f'<text class="count middle" x="{x + side / 2:.1f}" y="{y + side / 2 + 4:.1f}">{count}</text>'
                )
    return Chart(title, height, "".join(body))


def time_line(title: str, spans: Sequence[Span], x_label: str) -> Chart:
    """Bars below each other, each with its name above it."""
    height = TOP + BOTTOM + SPAN_HEIGHT * max(len(spans), 1)
    x_axis = make_axis([edge for span in spans for edge in (span.begin, span.end)], RIGHT + 4, WIDTH - RIGHT - 4)
    body = [_x_label(x_label, height, RIGHT + 4)]
    for tick in x_axis.ticks:
        x = x_axis.pixel(tick)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        body.append(f'<text class="tick middle" x="{x:.1f}" y="{height - BOTTOM + 14}">{label(tick)}</text>')
    for index, span in enumerate(spans):
        x, y = x_axis.pixel(span.begin), TOP + SPAN_HEIGHT * index
        width = max(x_axis.pixel(span.end) - x, 1.5)
        name = span.name if len(span.name) <= NAME_LENGTH else span.name[: NAME_LENGTH - 1] + "…"
        body.append(f'<text class="tick" x="{RIGHT + 4}" y="{y + 14}">{escape(name)}</text>')
        body.append(
            f'<rect class="span {escape(span.kind)}" x="{x:.1f}" y="{y + 19}" width="{width:.1f}" height="16" rx="2">'
            f"<title>{escape(span.name)}</title></rect>"
        )
    return Chart(title, height, "".join(body), _range("x", x_axis))


def _curve(curve: Curve, colour: int, x_axis: Axis, y_axis: Axis) -> str:
    points = [(x_axis.pixel(x), y_axis.pixel(y)) for x, y in zip(curve.x, curve.y, strict=True)]
    parts = []
    if curve.band:
        parts.append(f'<polygon class="band c{colour}" points="{_between(curve.x, *curve.band, x_axis, y_axis)}"/>')
    if curve.look not in ("points", "rings"):
        joined = " ".join(f"{x:.3f},{y:.3f}" for x, y in points)
        name = escape(curve.name)
        parts.append(f'<polyline class="line {curve.look} c{colour}" data-name="{name}" points="{joined}"/>')
    if curve.look in ("points", "rings") or len(points) == 1:
        kind = "ring" if curve.look == "rings" else "dot"
        parts += [f'<circle class="{kind} c{colour}" cx="{x:.3f}" cy="{y:.3f}" r="3"/>' for x, y in points]
    return "".join(parts)


def _between(x: Sequence[float], low: Sequence[float], high: Sequence[float], x_axis: Axis, y_axis: Axis) -> str:
    """The outline of an area."""
    edge = [*zip(x, high, strict=True), *zip(reversed(x), reversed(low), strict=True)]
    return " ".join(f"{x_axis.pixel(a):.2f},{y_axis.pixel(b):.2f}" for a, b in edge)


def _range(name: str, axis: Axis) -> str:
    return f'data-{name}="{axis.low:.17g} {axis.high:.17g} {axis.begin} {axis.end}"'


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.pixel(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{label(tick)}</text>')
    for tick in x_axis.ticks:
        x = x_axis.pixel(tick)
        anchor = "end" if x > WIDTH - RIGHT - 16 else "middle"
        parts.append(f'<text class="tick {anchor}" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{label(tick)}</text>')
    return parts


def _x_label(text: str, height: float = HEIGHT, x: float = LEFT) -> str:
    return f'<text class="tick" x="{x}" y="{height - 6:g}">{escape(text)}</text>'
