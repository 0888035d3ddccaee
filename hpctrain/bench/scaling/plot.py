"""The picture of ``hpctrain bench scaling``: step time and efficiency, measured, fitted and ideal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.report.chart import picture
from hpctrain.report.svg import Curve, lines

GREY = 7


def draw(result: Mapping[str, Any]) -> str:
    """An SVG file of the JSON result."""
    steps, efficiencies = [], []
    sizes = sorted({row["ranks"] for found in result["modes"].values() for row in _rows(found)})
    for colour, (mode, found) in enumerate(result["modes"].items()):
        steps += _curves(mode, found, "step_s", "step_bounds_s", 1e3, colour)
        efficiencies += _curves(mode, found, "efficiency", "efficiency_bounds", 100, colour)
        base = found["measured"][0]
        span = [min(row["ranks"] for row in _rows(found)), max(row["ranks"] for row in _rows(found))]
        ideal = [1e3 * base["step_s"] * (1 if mode == "weak" else base["ranks"] / count) for count in span]
        steps.append(Curve(f"{mode}, ideal", span, ideal, "dotted", colour))
    ends = [sizes[0], sizes[-1]]
    efficiencies.append(Curve("ideal", ends, [100, 100], "dotted", GREY))
    efficiencies.append(Curve("threshold", ends, [100 * result["threshold"]] * 2, "dashed", GREY))
    return picture(
        [
            lines(f"Scaling of {result['run']}: ms a step", steps, "ranks", log_y=True, sizes=sizes),
            lines("Efficiency, %", efficiencies, "ranks", from_zero=True, sizes=sizes),
        ]
    )


def _rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*found["measured"], *found["predicted"]]


def _curves(mode: str, found: Mapping[str, Any], key: str, bounds: str, unit: float, colour: int) -> list[Curve]:
    curves = []
    if found["predicted"]:
        rows = sorted(found["predicted"], key=lambda row: row["ranks"])
        low, high = ([unit * row[bounds][side] for row in rows] for side in (0, 1))
        ranks, values = [row["ranks"] for row in rows], [unit * row[key] for row in rows]
        curves.append(Curve(f"{mode}, model", ranks, values, colour=colour, band=(low, high)))
    for crowded in (False, True):
        rows = [row for row in found["measured"] if row["oversubscribed"] is crowded]
        name = f"{mode}, measured" + (", more threads than cores" if crowded else "")
        points = [unit * row[key] for row in rows]
        if rows:
            curves.append(Curve(name, [row["ranks"] for row in rows], points, "rings" if crowded else "points", colour))
    return curves
