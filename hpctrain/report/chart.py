"""A chart: what is drawn, apart from its colours, which a page may change; and files of charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH = 720
"""Of every chart, in pixels."""
MARGIN, ROW_HEIGHT, LETTER_WIDTH = 16, 16, 7.0
"""Of the text above a chart in a file."""

LIGHT = {
    "back": "#fff", "text": "#1c2026", "soft": "#667080", "rule": "#dde1e7", "card": "#f6f7f9",
    "c0": "#2563b8", "c1": "#c2571a", "c2": "#2b8a4b", "c3": "#9b3fb5",
    "c4": "#b3282d", "c5": "#0f8a94", "c6": "#8a6d1a", "c7": "#5b6472",
}  # fmt: skip
"""Colours by name."""
DARK = {
    "back": "#14171b", "text": "#e4e7eb", "soft": "#98a2b0", "rule": "#333a44", "card": "#1d2127",
    "c0": "#6ea8f5", "c1": "#f0965a", "c2": "#66c98a", "c3": "#cf8be4",
    "c4": "#f07f84", "c5": "#58cbd5", "c6": "#d6b85a", "c7": "#a9b2be",
}  # fmt: skip


Look = Literal["line", "dotted", "dashed", "points", "rings", "area"]


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    name: str
    colour: int
    """0 to 7."""
    look: Look = "line"


@dataclass(frozen=True)
class Chart:
    """A drawing whose colours are CSS classes."""

    title: str
    height: float
    body: str
    ranges: str = ""
    """``data-`` attributes, so that a reader can get the values back from the points."""
    legend: tuple[Key, ...] = ()

    def inline(self) -> str:
        """As an element of a page that has the ``style``."""
        name = escape(self.title)
        return (
            f'<svg role="img" aria-label="{name}" viewBox="0 0 {WIDTH} {self.height:g}" {self.ranges}>'
            f"<title>{name}</title>{self.body}</svg>"
        )


def style(colours: Mapping[str, str]) -> str:
    """CSS of charts in these colours."""
    rules = [
        f"svg text {{ font-size: 11px; fill: {colours['soft']}; }}",
        f".grid {{ stroke: {colours['rule']}; stroke-width: 1; }}",
        f".mark {{ stroke: {colours['soft']}; stroke-dasharray: 3 3; }}",
        f".above {{ fill: {colours['c1']}; }} .below {{ fill: {colours['c0']}; }}",
        f".span.good {{ fill: {colours['c2']}; }} .span.other {{ fill: {colours['c4']}; }}",
        ".line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .ring { fill: none; stroke-width: 1.6; }",
        ".dotted { stroke-dasharray: 1.6 3; } .dashed { stroke-dasharray: 6 3; }",
        ".area { stroke: none; fill-opacity: .75; } .band { stroke: none; fill-opacity: .15; }",
        f".count {{ fill: {colours['text']}; }}",
        ".middle { text-anchor: middle; } .end { text-anchor: end; }",
    ]
    for index in range(8):
        colour = colours[f"c{index}"]
        rules.append(f".line.c{index}, .ring.c{index} {{ stroke: {colour}; }}")
        rules.append(f".area.c{index}, .band.c{index}, .dot.c{index} {{ fill: {colour}; }}")
    return "\n".join(rules)


def picture(charts: Sequence[Chart]) -> str:
    """An SVG file of its own: charts below each other, each with its title and legend."""
    body, y = [], 4.0
    for chart in charts:
        body.append(f'<text class="title" x="{MARGIN}" y="{y + 15:g}">{escape(chart.title)}</text>')
        x, y = float(MARGIN), y + 24
        for key in chart.legend:
            width = 26 + LETTER_WIDTH * len(key.name)
            if x > MARGIN and x + width > WIDTH - MARGIN:
                x, y = float(MARGIN), y + ROW_HEIGHT
            entry = f'{_symbol(key)}<text x="19" y="4">{escape(key.name)}</text>'
            body.append(f'<g transform="translate({x:g} {y + 7:g})">{entry}</g>')
            x += width
        y += ROW_HEIGHT if chart.legend else 0
        body.append(f'<g transform="translate(0 {y:g})" {chart.ranges}>{chart.body}</g>')
        y += chart.height + 8
    paper = f'<rect width="{WIDTH}" height="{y:g}" fill="{LIGHT["back"]}"/>'
    look = f"{style(LIGHT)}\n.title {{ font-size: 15px; font-weight: 600; fill: {LIGHT['text']}; }}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:g}" viewBox="0 0 {WIDTH} {y:g}" '
        f'font-family="system-ui, sans-serif"><style>\n{look}\n</style>{paper}{"".join(body)}</svg>\n'
    )


def _symbol(key: Key) -> str:
    """What a legend shows before a name: 14 pixels wide, around y = 0."""
    if key.look in ("points", "rings"):
        return f'<circle class="{"ring" if key.look == "rings" else "dot"} c{key.colour}" cx="7" cy="0" r="3"/>'
    if key.look == "area":
        return f'<rect class="area c{key.colour}" y="-4" width="14" height="8"/>'
    return f'<line class="line {key.look} c{key.colour}" x2="14"/>'
