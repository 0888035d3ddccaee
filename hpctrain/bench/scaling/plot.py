"""The picture of ``hpctrain bench scaling``: step time and efficiency, measured, fitted and ideal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"weak": "tab:blue", "strong": "tab:orange"}


def save(result: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG of the JSON result.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: no global state, no display
    except ImportError as error:
        raise MissingExtra("matplotlib", "report") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    steps, efficiencies = figure.subplots(1, 2)
    for mode, found in result["modes"].items():
        _draw(steps, mode, found, "step_s", "step_bounds_s", 1e3)
        _draw(efficiencies, mode, found, "efficiency", "efficiency_bounds", 100)
        base = found["measured"][0]
        ranks = [row["ranks"] for row in (*found["measured"], *found["predicted"])]
        span = [min(ranks), max(ranks)]
        ideal = [1e3 * base["step_s"] * (1 if mode == "weak" else base["ranks"] / count) for count in span]
        steps.plot(span, ideal, color=COLOURS[mode], linestyle=":", linewidth=1, label=f"{mode}, ideal")
    efficiencies.axhline(100, color="gray", linestyle=":", linewidth=1, label="ideal")
    efficiencies.axhline(100 * result["threshold"], color="gray", linestyle="--", linewidth=1, label="threshold")
    efficiencies.set_ylim(bottom=0)
    steps.set_yscale("log")
    ticks = sorted({row["ranks"] for found in result["modes"].values() for row in _rows(found)})
    for axes, label in ((steps, "ms a step"), (efficiencies, "efficiency, %")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"Scaling of {result['run']}", fontsize=11)
    figure.savefig(path, dpi=120)


def _rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*found["measured"], *found["predicted"]]


def _draw(axes: Axes, mode: str, found: Mapping[str, Any], key: str, bounds: str, unit: float) -> None:
    colour = COLOURS[mode]
    for crowded, face in ((False, colour), (True, "none")):
        rows = [row for row in found["measured"] if row["oversubscribed"] is crowded]
        if rows:
            label = f"{mode}, measured" + (", more threads than cores" if crowded else "")
            points = [unit * row[key] for row in rows]
            ranks = [row["ranks"] for row in rows]
            axes.plot(ranks, points, "o", color=colour, markerfacecolor=face, label=label)
    if found["predicted"]:
        rows = sorted(found["predicted"], key=lambda row: row["ranks"])
        ranks = [row["ranks"] for row in rows]
        axes.plot(ranks, [unit * row[key] for row in rows], color=colour, linewidth=1.2, label=f"{mode}, model")
        low, high = ([unit * row[bounds][side] for row in rows] for side in (0, 1))
        axes.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
