"""Output of ``hpctrain bench scaling``: numbers for JSON; tables, charts and advice for people. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.bench.scaling_runs import PARTS, Mode, Shape, Timing
from hpctrain.report.charts import ChartLine, line_chart
from hpctrain.report.drawing import Chart

GREY = 7
"""Palette index of reference lines."""


def mode_result(mode: Mode, timings: Sequence[Timing], crowded: Sequence[Shape], threshold: float) -> dict[str, Any]:
    """Everything about one scaling mode, for JSON.

    Args:
        mode: weak or strong.
        timings: measured steps, by size; the first is the base of the efficiency.
        crowded: shapes with more threads than cores, for which nothing is recommended.
        threshold: least acceptable efficiency.
    """
    rows = [_measured(mode, timings[0], each, each.shape in crowded) for each in timings]
    fair = [timing.shape for timing in timings if timing.shape not in crowded]
    efficiencies = [row["efficiency"] for row in rows if not row["oversubscribed"]]
    ranks, sentence = recommend(fair, efficiencies, threshold)
    return {"measured": rows, "recommended_ranks": ranks, "recommendation": f"{mode} scaling: {sentence}"}


def recommend(shapes: Sequence[Shape], efficiencies: Sequence[float], threshold: float) -> tuple[int | None, str]:
    """Recommends the largest size up to which the efficiency stays at or above ``threshold``.

    Args:
        shapes: measured sizes, in ascending order.
        efficiencies: for each of them.
        threshold: least acceptable efficiency.

    Returns:
        Ranks of that size, or None, and a sentence that says so.
    """
    if len(shapes) < 2:
        return None, "nothing to recommend, because fewer than two sizes have a core for each thread"
    good = len(list(itertools.takewhile(lambda value: value >= threshold, efficiencies)))
    if not good:
        return None, f"not even {shapes[0]} reaches {threshold:.0%}"
    text = f"worth it up to {shapes[good - 1]}, at {efficiencies[good - 1]:.0%} efficiency"
    if good == len(shapes):
        return shapes[-1].ranks, f"{text}; nothing larger was measured"
    return shapes[good - 1].ranks, f"{text}; {shapes[good]}: {efficiencies[good]:.0%}"


def efficiency(mode: Mode, base: Timing, timing: Timing) -> float:
    """Speed per rank relative to the base; 1 is ideal."""
    ideal = base.step_s if mode == "weak" else base.step_s * base.shape.ranks / timing.shape.ranks
    return ideal / timing.step_s


def text(result: Mapping[str, Any]) -> str:
    """Formats the result as text."""
    lines = [f"{result['run']}: {result['framework']}, {result['reducer']}, {result['gradient_bytes'] / 2**20:.3g} MiB"]
    lines[0] += f" of gradients, {result['threads']} thread(s) a rank"
    parts = "".join(f"{name:>10}" for name in PARTS)
    head = f"{'nodes':>5}{'ranks':>7}{'step':>10}{parts}{'samples/s':>11}{'efficiency':>12}"
    for mode, found in result["modes"].items():
        lines += ["", f"{mode} scaling, ms a step", head, *map(_line, found["measured"])]
    lines += ["", *(f"WARNING: {warning}" for warning in result["warnings"])]
    lines += [found["recommendation"] for found in result["modes"].values()]
    return "\n".join(lines)


def charts(result: Mapping[str, Any]) -> list[Chart]:
    """Charts of step time and efficiency of the JSON result."""
    steps, efficiencies = [], []
    sizes = sorted({row["ranks"] for found in result["modes"].values() for row in found["measured"]})
    ends = [sizes[0], sizes[-1]]
    for colour, (mode, found) in enumerate(result["modes"].items()):
        steps += _points(mode, found["measured"], "step_s", 1e3, colour)
        efficiencies += _points(mode, found["measured"], "efficiency", 100, colour)
        base = found["measured"][0]
        ideal = [1e3 * base["step_s"] * (1 if mode == "weak" else base["ranks"] / count) for count in ends]
        steps.append(ChartLine(f"{mode}, ideal", ends, ideal, "dotted", colour))
    efficiencies.append(ChartLine("ideal", ends, [100, 100], "dotted", GREY))
    efficiencies.append(ChartLine("threshold", ends, [100 * result["threshold"]] * 2, "dashed", GREY))
    return [
        line_chart(f"Scaling of {result['run']}: ms a step", steps, "ranks", log_y=True, sizes=sizes),
        line_chart("Efficiency, %", efficiencies, "ranks", from_zero=True, sizes=sizes),
    ]


def _measured(mode: Mode, base: Timing, timing: Timing, crowded: bool) -> dict[str, Any]:
    low, high = np.percentile(timing.parts.sum(axis=1), (25, 75))
    return {
        "nodes": timing.shape.nodes,
        "ranks": timing.shape.ranks,
        "global_batch": timing.global_batch,
        "intervals": len(timing.parts),
        "step_s": timing.step_s,
        "step_quartiles_s": [float(low), float(high)],
        **{f"{name}_s": float(seconds) for name, seconds in zip(PARTS, timing.typical, strict=True)},
        "samples_per_s": timing.global_batch / timing.step_s,
        "efficiency": efficiency(mode, base, timing),
        "oversubscribed": crowded,
    }


def _line(row: Mapping[str, Any]) -> str:
    parts = "".join(f"{1e3 * row[f'{name}_s']:>10.2f}" for name in PARTS)
    text = f"{row['nodes']:>5}{row['ranks']:>7}{1e3 * row['step_s']:>10.2f}{parts}{row['samples_per_s']:>11.4g}"
    return f"{text}{row['efficiency']:>12.0%}" + ("  more threads than cores" if row["oversubscribed"] else "")


def _points(mode: str, rows: Sequence[Mapping[str, Any]], key: str, unit: float, colour: int) -> list[ChartLine]:
    found = []
    for crowded in (False, True):
        chosen = [row for row in rows if row["oversubscribed"] is crowded]
        name = f"{mode}, measured" + (", more threads than cores" if crowded else "")
        x = [row["ranks"] for row in chosen]
        y = [unit * row[key] for row in chosen]
        if chosen:
            found.append(ChartLine(name, x, y, "rings" if crowded else "points", colour))
    return found
