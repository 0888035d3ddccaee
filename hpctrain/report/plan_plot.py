"""Plans that share out a model, as a picture: what a rank needs of memory under each, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hpctrain.report.axes import Axis, label, make_axis
from hpctrain.report.chart import WIDTH, Chart, Key
from hpctrain.run.plans import Planned, Plans

NAMES, RIGHT, GAP, TOP, BOTTOM, ROW, LETTER = 230, 14, 26, 22, 38, 22, 6.5
"""Pixels: for names beside the bars, at the right edge, between the two halves, above and below, of a row and of a
letter."""
STEPS = 170
"""Of the half with the seconds of a step, if they are known."""
NUMBER = 46
"""Of a number behind a bar."""
GREY = 7
FAR = 3
"""Times the largest bar beyond which there is no line for what a rank has: it would leave no room for the bars."""
UNITS = ((2**30, "GiB"), (2**20, "MiB"))


def draw(found: Plans, own: str | None = None) -> Chart:
    """A row for each plan: stacked bytes, and beside them milliseconds.

    Args:
        found: all plans, and what a rank has, drawn as a line.
        own: name of the plan that a run has, which is marked.
    """
    bars, limit = found.plans, found.memory
    timed = any(bar.step_s is not None for bar in bars)
    end = WIDTH - RIGHT - (STEPS + GAP if timed else 0)
    most = max(bar.total for bar in bars)
    size, unit = _unit(most)
    height = TOP + BOTTOM + ROW * len(bars)
    shown = [most, limit] if limit is not None and limit <= FAR * most else [most]
    memory = make_axis([max(shown) / size], NAMES, end - NUMBER, from_zero=True, most_ticks=4)
    body = [*_axis(memory, height, f"{unit} of a rank")]
    kinds = [name for name in bars[0].parts if any(bar.parts[name] for bar in bars)]
    for row, bar in enumerate(bars):
        y = TOP + ROW * row
        mark = "▸ " if bar.name == own else ""
        body.append(f'<text class="tick end" x="{NAMES - 8}" y="{y + 14}">{escape(_short(mark + bar.name))}</text>')
        done = 0
        for colour, name in enumerate(kinds):
            x, done = memory.pixel(done / size), done + bar.parts[name]
            told = escape(f"{bar.name}: {name} {bar.parts[name] / size:.4g} {unit}")
            body.append(
                f'<rect class="area c{colour}" x="{x:.2f}" y="{y + 2}" width="{memory.pixel(done / size) - x:.2f}" '
                f'height="{ROW - 5}" data-value="{bar.parts[name]}"><title>{told}</title></rect>'
            )
        body.append(_number(memory.pixel(done / size), y, f"{done / size:.4g}"))
    if limit is not None:
        x, (own_size, own_unit) = memory.pixel(min(limit / size, memory.high)), _unit(limit)
        told = f"a rank has {limit / own_size:.4g} {own_unit}" + ("" if limit in shown else " \u2192")
        if limit in shown:
            body.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{height - BOTTOM}"/>')
        at = min(max(x, NAMES + len(told) * LETTER / 2), end - len(told) * LETTER / 2)
        body.append(f'<text class="count middle" x="{at:.1f}" y="{TOP - 8}">{told}</text>')
    if timed:
        body += _steps(bars, end + GAP, height)
    legend = tuple(Key(name, colour, "area") for colour, name in enumerate(kinds))
    return Chart("Plans: memory of a rank" + (", and a step" if timed else ""), height, "".join(body), legend=legend)


def _steps(bars: Sequence[Planned], begin: float, height: float) -> list[str]:
    known = [1e3 * bar.step_s for bar in bars if bar.step_s is not None]
    axis = make_axis(known, begin, WIDTH - RIGHT - NUMBER, from_zero=True, most_ticks=2)
    body = _axis(axis, height, "ms a step, expected")
    for row, bar in enumerate(bars):
        if bar.step_s is not None:
            y, value = TOP + ROW * row, 1e3 * bar.step_s
            told = escape(f"{bar.name}: {value:.4g} ms")
            body.append(
                f'<rect class="area c{GREY}" x="{begin:.2f}" y="{y + 2}" width="{axis.pixel(value) - begin:.2f}" '
                f'height="{ROW - 5}" data-value="{bar.step_s:.6g}"><title>{told}</title></rect>'
            )
            body.append(_number(axis.pixel(value), y, f"{value:.4g}"))
    return body


def _axis(axis: Axis, height: float, text: str) -> list[str]:
    parts = [f'<text class="tick" x="{axis.begin:.1f}" y="{height - 6}">{text}</text>']
    for tick in axis.ticks:
        x = axis.pixel(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text class="tick middle" x="{x:.1f}" y="{height - BOTTOM + 14}">{label(tick)}</text>')
    return parts


def _number(x: float, y: float, text: str) -> str:
    return f'<text class="count" x="{x + 4:.1f}" y="{y + 14}">{text}</text>'


def _short(name: str) -> str:
    most = int((NAMES - 12) / LETTER)
    return name if len(name) <= most else name[: most - 1] + "…"


def _unit(num_bytes: int) -> tuple[int, str]:
    return next((one for one in UNITS if num_bytes >= 10 * one[0]), UNITS[-1])
