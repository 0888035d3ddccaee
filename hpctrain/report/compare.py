"""Compares runs: differences in run files and results, and a ranking of a sweep's points. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.report.page import number
from hpctrain.report.plots import ReportSection, line_of, line_section
from hpctrain.report.summary import summarize
from hpctrain.run.history import RunHistory
from hpctrain.system.json_shape import flat

RESULTS = {
    "state": "state",
    "steps": "steps",
    "ranks": "ranks",
    "framework": "framework",
    "reducer": "reducer",
    "final_loss": "training loss",
    "samples_per_s_median": "samples/s",
    "goodput": "goodput",
    "rank_hours": "rank hours",
    "seconds": "running time",
}
"""Results besides the validation metrics: keys of the JSON, and what tables call them."""
OWN = ("name", "run_dir")
"""Keys that differ between all runs of a sweep."""
SHOWN = ("state", "steps", "final_loss", "seconds")
"""Results shown besides the validation metrics."""


def compare(runs: Sequence[RunHistory]) -> dict[str, Any]:
    """Returns names, differing configuration keys and results, each a list in the order of the runs, for JSON."""
    summaries = [summarize(run) for run in runs]
    results: dict[str, list[Any]] = {key: [summary[key] for summary in summaries] for key in RESULTS}
    for name in sorted({name for summary in summaries for name in summary["metrics"]}):
        results[name] = [summary["metrics"].get(name, {}).get("last") for summary in summaries]
    accounts = [run.run.account for run in runs]
    results["goodput"] = [None if account.is_short else account.goodput for account in accounts]
    names = [str(summary["name"]) for summary in summaries]
    paths = [str(run.run.path) for run in runs]
    return {
        "runs": names if len(set(names)) == len(names) else paths,
        "configuration": differences([flat(run.run.config) for run in runs]),
        "results": results,
    }


def label(result: str) -> str:
    """What tables call a result; all but RESULTS are validation metrics."""
    return RESULTS.get(result) or f"validation {result}"


def tables(compared: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Titles and rows, for people, of what ``compare`` returned, without what is empty; a row begins with its name."""

    def rows(part: str) -> list[list[str]]:
        known = {key: values for key, values in compared[part].items() if values.count(None) < len(values)}
        return [[key, *(number(value, key) for value in values)] for key, values in known.items()]

    results = [[label(key), *cells] for key, *cells in rows("results")]
    made = [("What differs in the run files", rows("configuration")), ("Results", results)]
    return [(title, found) for title, found in made if found]


def overlays(runs: Sequence[RunHistory], names: Sequence[str]) -> list[ReportSection]:
    """Plots each curve of all runs in one chart."""
    kinds = [
        ("loss", "Loss", [run.train for run in runs]),
        ("samples_per_s", "Samples per second", [run.train for run in runs]),
        ("tokens_per_s", "Tokens per second", [run.train for run in runs]),
    ]
    metrics = sorted({name for run in runs for name in run.metrics})
    kinds += [(name, f"Validation {name}", [run.metrics for run in runs]) for name in metrics]
    plots = []
    for key, title, sources in kinds:
        lines = [line_of(name, source[key]) for name, source in zip(names, sources, strict=True) if key in source]
        if any(line.x for line in lines):
            plots.append(line_section(title.replace(" ", "_").lower(), title, lines))
    return plots


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values differ between configurations, with the values."""
    keys = sorted({key for config in configs for key in config})
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def sweep_table(runs: Sequence[RunHistory], metric: str | None = None, mode: str = "min") -> dict[str, Any]:
    """Returns what the points are ranked by, and the points, best first and those without a result last, for JSON.

    Args:
        runs: the points.
        metric: validation metric that ranks them; by default ``loss``, or the training loss without validation.
        mode: ``min`` or ``max``, whichever is better for ``metric``.
    """
    found = compare(runs)
    results, configuration = found["results"], found["configuration"]
    metrics = [name for name in results if any(name in run.metrics for run in runs)]
    ranked_by = next((name for name in (metric, "loss") if name in metrics), "final_loss")
    points = [
        {
            "point": run.run.path.name,
            "folder": str(run.run.path),
            "configuration": {key: values[row] for key, values in configuration.items() if key not in OWN},
            "results": {key: results[key][row] for key in dict.fromkeys((*SHOWN[:2], *metrics, *SHOWN[2:]))},
        }
        for row, run in enumerate(runs)
    ]
    sign = -1 if mode == "max" and ranked_by == metric else 1

    def place(point: dict[str, Any]) -> float:
        value = point["results"][ranked_by]
        return math.inf if value is None or math.isnan(value) else sign * value

    return {"ranked_by": ranked_by, "points": sorted(points, key=place)}
