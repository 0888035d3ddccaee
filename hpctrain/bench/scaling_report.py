"""Output of ``hpctrain bench scaling``: numbers for JSON; tables, charts and advice for people. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.bench import scaling_model as model
from hpctrain.bench.scaling_model import Mode, StepGradients, Timing
from hpctrain.report.charts import ChartLine, line_chart
from hpctrain.report.drawing import Chart, picture

GREY = 7
"""Palette index of reference lines."""


@dataclass(frozen=True)
class Recommendation:
    """The largest size worth using."""

    shape: model.Shape | None
    """The largest efficient shape; None if even the smallest is not."""
    sentence: str


def recommend(mode: Mode, predictions: Sequence[model.Prediction], threshold: float) -> Recommendation:
    """Recommends the largest shape up to which the efficiency stays at or above ``threshold``; predictions by size."""
    good = list(itertools.takewhile(lambda each: each.efficiency >= threshold, predictions))
    if not good:
        first = predictions[0]
        return Recommendation(None, f"{mode} scaling: not even {first.shape} reaches {threshold:.0%}: {_said(first)}")
    last = good[-1]
    text = f"{mode} scaling: worth it up to {last.shape}, at {_said(last)}"
    if len(good) == len(predictions):
        return Recommendation(last.shape, f"{text}; nothing larger was considered")
    after = predictions[len(good)]
    doubt = f", and might still reach {threshold:.0%}" if after.high >= threshold else ""
    share = after.exchange_s / after.step_s
    return Recommendation(
        last.shape, f"{text}; {after.shape} would have {_said(after)}{doubt}; exchange would take {share:.0%} of a step"
    )


def mode_result(
    mode: Mode,
    timings: Sequence[Timing],
    crowded: Sequence[model.Shape],
    samples: Sequence[model.Sample],
    gradients: StepGradients,
    larger: Sequence[model.Shape],
    assumed: model.RingLink | None,
    threshold: float,
) -> dict[str, Any]:
    """Everything about one scaling mode, for JSON.

    Args:
        mode: weak or strong.
        timings: measured steps, by size.
        crowded: shapes with more threads than cores, which are excluded from fits.
        samples: measured exchanges.
        gradients: the gradients that a step exchanges.
        larger: shapes beyond those measured.
        assumed: link between nodes, if none was measured.
        threshold: least acceptable efficiency.
    """
    base = timings[0]
    result: dict[str, Any] = {"measured": [_measured(mode, base, each, crowded) for each in timings]}
    fair = [timing for timing in timings if timing.shape not in crowded]
    if len(fair) < 2:
        sentence = f"{mode} scaling: nothing to recommend, because fewer than two sizes have a core for each thread"
        return result | {"predicted": [], "recommended_ranks": None, "recommendation": sentence}
    if mode == "strong":
        law = model.fit_amdahl([each.shape.ranks for each in fair], [each.step_s for each in fair])
        result["amdahl_serial_fraction"] = law.serial_fraction
    every = [*(each.shape for each in fair), *larger]
    predictions = model.predict(mode, fair, samples, gradients, every, assumed)
    advice = recommend(mode, predictions, threshold)
    return result | {
        "predicted": [_predicted(each) for each in predictions],
        "recommended_ranks": advice.shape.ranks if advice.shape else None,
        "recommendation": advice.sentence,
    }


def exchange_result(samples: Sequence[model.Sample], assumed: model.RingLink | None) -> dict[str, Any]:
    """The measured exchanges and their model, for JSON."""
    fitted = model.fit_exchange(samples)
    whole = model.ExchangeModel(fitted.inside, fitted.between or assumed)
    groups: dict[tuple[model.Shape, int], list[float]] = {}
    for sample in samples:
        groups.setdefault((sample.shape, sample.bytes), []).append(sample.seconds)
    rows = [
        {
            "nodes": shape.nodes,
            "ranks": shape.ranks,
            "bytes": size,
            "median_s": float(np.median(seconds)),
            "model_s": whole.seconds(shape, size),
        }
        for (shape, size), seconds in groups.items()
    ]
    return {
        "measured": rows,
        "inside_node": _link(whole.inside),
        "between_nodes": _link(whole.between),
        "between_nodes_assumed": fitted.between is None and assumed is not None,
    }


def text(result: Mapping[str, Any]) -> str:
    """Formats the result as text."""
    lines = [f"{result['run']}: {result['framework']}, {result['reducer']}, {result['gradient_bytes'] / 2**20:.3g} MiB"]
    lines[0] += f" of gradients, {result['threads']} thread(s) a rank"
    for name, link in (("in a node", "inside_node"), ("between nodes", "between_nodes")):
        if found := result["exchange"][link]:
            said = "assumed" if link == "between_nodes" and result["exchange"]["between_nodes_assumed"] else "fitted"
            rate = f"{found['bytes_per_s'] / 1e9:.3g} GB/s" if found["bytes_per_s"] else "no limit seen in bandwidth"
            lines.append(f"exchange {name} ({said}): {1e6 * found['alpha_s']:.3g} us a message, {rate}")
    for mode, found in result["modes"].items():
        lines += ["", f"{mode} scaling, ms a step", _head()]
        lines += [_measured_line(row) for row in found["measured"]]
        measured = {(row["nodes"], row["ranks"]) for row in found["measured"]}
        lines += [_predicted_line(row) for row in found["predicted"] if (row["nodes"], row["ranks"]) not in measured]
        if "amdahl_serial_fraction" in found:
            lines.append(f"serial fraction by Amdahl's law: {found['amdahl_serial_fraction']:.3f}")
    lines += ["", *(f"WARNING: {warning}" for warning in result["warnings"])]
    lines += [found["recommendation"] for found in result["modes"].values()]
    return "\n".join(lines)


def _measured(mode: Mode, base: Timing, timing: Timing, crowded: Sequence[model.Shape]) -> dict[str, Any]:
    low, high = np.percentile(timing.parts.sum(axis=1), (25, 75))
    return {
        "nodes": timing.shape.nodes,
        "ranks": timing.shape.ranks,
        "global_batch": timing.global_batch,
        "intervals": len(timing.parts),
        "step_s": timing.step_s,
        "step_quartiles_s": [float(low), float(high)],
        **{f"{name}_s": float(seconds) for name, seconds in zip(model.PARTS, timing.typical, strict=True)},
        "samples_per_s": timing.global_batch / timing.step_s,
        "efficiency": model.efficiency(mode, base.shape, base.step_s, timing.shape, timing.step_s),
        "oversubscribed": timing.shape in crowded,
    }


def _predicted(each: model.Prediction) -> dict[str, Any]:
    return {
        "nodes": each.shape.nodes,
        "ranks": each.shape.ranks,
        "step_s": each.step_s,
        "step_bounds_s": [each.low_s, each.high_s],
        "exchange_s": each.exchange_s,
        "efficiency": each.efficiency,
        "efficiency_bounds": [each.low, each.high],
    }


def _link(link: model.RingLink | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {"alpha_s": link.alpha_s, "bytes_per_s": 1 / link.s_per_byte if link.s_per_byte else None}


def _head() -> str:
    parts = "".join(f"{name:>10}" for name in model.PARTS)
    return f"{'nodes':>5}{'ranks':>7}{'step':>10}{parts}{'samples/s':>11}{'efficiency':>12}"


def _measured_line(row: Mapping[str, Any]) -> str:
    parts = "".join(f"{1e3 * row[f'{name}_s']:>10.2f}" for name in model.PARTS)
    text = f"{row['nodes']:>5}{row['ranks']:>7}{1e3 * row['step_s']:>10.2f}{parts}{row['samples_per_s']:>11.4g}"
    return f"{text}{row['efficiency']:>12.0%}" + ("  more threads than cores" if row["oversubscribed"] else "")


def _predicted_line(row: Mapping[str, Any]) -> str:
    low, high = row["efficiency_bounds"]
    text = f"{row['nodes']:>5}{row['ranks']:>7}{1e3 * row['step_s']:>10.2f}{'':>10}{1e3 * row['exchange_s']:>10.2f}"
    return f"{text}{'':>31}{row['efficiency']:>12.0%}  predicted, {low:.0%} to {high:.0%}"


def _said(prediction: model.Prediction) -> str:
    return f"{prediction.efficiency:.0%} efficiency ({prediction.low:.0%} to {prediction.high:.0%})"


def draw(result: Mapping[str, Any]) -> str:
    """Draws the JSON result as an SVG file. Raises UserError without matplotlib."""
    return picture(charts(result))


def charts(result: Mapping[str, Any]) -> list[Chart]:
    """Charts of step time and efficiency of the JSON result."""
    steps, efficiencies = [], []
    sizes = sorted({row["ranks"] for found in result["modes"].values() for row in _rows(found)})
    for colour, (mode, found) in enumerate(result["modes"].items()):
        steps += _curves(mode, found, "step_s", "step_bounds_s", 1e3, colour)
        efficiencies += _curves(mode, found, "efficiency", "efficiency_bounds", 100, colour)
        base = found["measured"][0]
        span = [min(row["ranks"] for row in _rows(found)), max(row["ranks"] for row in _rows(found))]
        ideal = [1e3 * base["step_s"] * (1 if mode == "weak" else base["ranks"] / count) for count in span]
        steps.append(ChartLine(f"{mode}, ideal", span, ideal, "dotted", colour))
    ends = [sizes[0], sizes[-1]]
    efficiencies.append(ChartLine("ideal", ends, [100, 100], "dotted", GREY))
    efficiencies.append(ChartLine("threshold", ends, [100 * result["threshold"]] * 2, "dashed", GREY))
    return [
        line_chart(f"Scaling of {result['run']}: ms a step", steps, "ranks", log_y=True, sizes=sizes),
        line_chart("Efficiency, %", efficiencies, "ranks", from_zero=True, sizes=sizes),
    ]


def _rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*found["measured"], *found["predicted"]]


def _curves(mode: str, found: Mapping[str, Any], key: str, bounds: str, unit: float, colour: int) -> list[ChartLine]:
    curves = []
    if found["predicted"]:
        rows = sorted(found["predicted"], key=lambda row: row["ranks"])
        low, high = ([unit * row[bounds][side] for row in rows] for side in (0, 1))
        ranks, values = [row["ranks"] for row in rows], [unit * row[key] for row in rows]
        curves.append(ChartLine(f"{mode}, model", ranks, values, colour=colour, band=(low, high)))
    for crowded in (False, True):
        rows = [row for row in found["measured"] if row["oversubscribed"] is crowded]
        name = f"{mode}, measured" + (", more threads than cores" if crowded else "")
        points = [unit * row[key] for row in rows]
        if rows:
            curves.append(
                ChartLine(name, [row["ranks"] for row in rows], points, "rings" if crowded else "points", colour)
            )
    return curves
