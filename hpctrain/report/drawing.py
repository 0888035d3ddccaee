"""Draws charts as SVG with matplotlib, if installed: inline in a page's colours, or as a file."""

from __future__ import annotations

import importlib.util
import io
import logging
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'hpctrain[report]'"
"""Command that installs matplotlib."""
WIDTH = 7.2
"""Width of every chart in inches."""
PALETTE = tuple(f"c{index}" for index in range(8))
LIGHT = {
    "back": "#ffffff", "text": "#1c2026", "soft": "#667080", "rule": "#dde1e7", "card": "#f6f7f9",
    "c0": "#2563b8", "c1": "#c2571a", "c2": "#2b8a4b", "c3": "#9b3fb5",
    "c4": "#b3282d", "c5": "#0f8a94", "c6": "#8a6d1a", "c7": "#5b6472",
}  # fmt: skip
"""Colours by name, in which charts are drawn."""
DARK = {
    "back": "#14171b", "text": "#e4e7eb", "soft": "#98a2b0", "rule": "#333a44", "card": "#1d2127",
    "c0": "#6ea8f5", "c1": "#f0965a", "c2": "#66c98a", "c3": "#cf8be4",
    "c4": "#f07f84", "c5": "#58cbd5", "c6": "#d6b85a", "c7": "#a9b2be",
}  # fmt: skip
"""Colours on a dark page."""
SETTINGS: Any = {
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "hpctrain",
    "text.parse_math": False,  # a name with two $ is not a formula
    "text.color": LIGHT["text"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.edgecolor": LIGHT["rule"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "grid.color": LIGHT["rule"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "lines.linewidth": 1.4,
    "legend.frameon": False,
}
"""Settings of matplotlib."""
REFERENCE = re.compile(r'(?:href="|url\()#([^")]+)')
"""References within an SVG."""


@dataclass(frozen=True)
class Chart:
    """A chart that can be drawn."""

    title: str
    draw: Callable[[Axes], None]
    """Draws into empty axes; the legend shows artists with labels."""
    height: float = 2.6
    """Height in inches."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Raises UserError without matplotlib."""
    if not can_draw():
        raise UserError("pictures need matplotlib, which is not installed", INSTALL)


def inline(chart: Chart) -> str:
    """Returns an ``svg`` element for a page that defines the colours as CSS variables; empty without matplotlib."""
    if not can_draw():
        return ""
    text = _svg([chart], titles=False)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.S)
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box, "matplotlib writes one"
    head = f'<svg role="img" aria-label="{escape(chart.title)}" {box[0]}>'
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)


def picture(charts: Sequence[Chart]) -> str:
    """Returns an SVG file with charts below each other, with titles, on white. Raises UserError without matplotlib."""
    require()
    return _svg(charts, titles=True)


def said(text: str, most: int = 60) -> str:
    """Makes a name printable and short. A leading underscore gets a space: matplotlib would hide the name."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    shown = shown if len(shown) <= most else shown[: most - 1] + "…"
    return f" {shown}" if shown.startswith("_") else shown


def figure_of(charts: Sequence[Chart], titles: bool) -> Figure:
    """Draws charts below each other in one figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(chart.height for chart in charts)), layout="constrained")
    parts = figure.subfigures(len(charts), 1, squeeze=False, height_ratios=[chart.height for chart in charts])[:, 0]
    for chart, part in zip(charts, parts, strict=True):
        axes = part.subplots()
        chart.draw(axes)
        if titles:
            axes.set_title(said(chart.title, 90))
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            columns = max(1, min(len(labels), 88 // (max(map(len, labels)) + 8)))
            part.legend(handles, labels, loc="outside lower left", ncols=columns)
    return figure


@contextmanager
def own_settings() -> Iterator[None]:
    """Context in which matplotlib uses ``SETTINGS`` instead of the user's matplotlibrc, and is quiet."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # messages about caches and missing glyphs
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        yield


def _svg(charts: Sequence[Chart], titles: bool) -> str:
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with own_settings():
        figure_of(charts, titles).savefig(text, format="svg", transparent=not titles, metadata=nothing)
    return _renamed(text.getvalue(), f"{zlib.crc32(charts[0].title.encode()):08x}")


def _renamed(text: str, prefix: str) -> str:
    """Gives referenced parts of an SVG unique names with a prefix: matplotlib's repeat from chart to chart."""
    names = {name: f"{prefix}-{number}" for number, name in enumerate(dict.fromkeys(REFERENCE.findall(text)))}
    text = REFERENCE.sub(lambda found: found[0].replace(found[1], names[found[1]]), text)
    return re.sub(r' id="([^"]+)"', lambda found: f' id="{names[found[1]]}"' if found[1] in names else "", text)
