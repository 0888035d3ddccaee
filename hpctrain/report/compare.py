"""Several runs beside each other: what differs in their run files, and in what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.report.plots import LinePlot, curve
from hpctrain.report.summary import summarize
from hpctrain.run import RunHistory

RESULTS = (
    "state",
    "steps",
    "ranks",
    "framework",
    "reducer",
    "final_loss",
    "samples_per_s_median",
    "goodput",
    "rank_hours",
    "seconds",
)


def compare(runs: Sequence[RunHistory]) -> dict[str, Any]:
    """JSON-able: names, differing configuration keys, results, each as a list in the order of the runs."""
    summaries = [summarize(run) for run in runs]
    results: dict[str, list[Any]] = {key: [summary[key] for summary in summaries] for key in RESULTS}
    for name in sorted({name for summary in summaries for name in summary["metrics"]}):
        results[name] = [summary["metrics"].get(name, {}).get("last") for summary in summaries]
    return {
        "runs": distinct_names([str(summary["name"]) for summary in summaries], [str(run.run.path) for run in runs]),
        "configuration": differences([flatten(run.run.config) for run in runs]),
        "results": results,
    }


def overlays(runs: Sequence[RunHistory], names: Sequence[str]) -> list[LinePlot]:
    """Each curve of all runs in one plot."""
    kinds = [
        ("loss", "Loss", [run.train for run in runs]),
        ("samples_per_s", "Samples per second", [run.train for run in runs]),
    ]
    metrics = sorted({name for run in runs for name in run.metrics})
    kinds += [(name, f"Validation {name}", [run.metrics for run in runs]) for name in metrics]
    plots = []
    for key, title, sources in kinds:
        curves = [curve(name, source[key]) for name, source in zip(names, sources, strict=True) if key in source]
        if any(each.x for each in curves):
            plots.append(LinePlot(title.replace(" ", "_").lower(), title, "step", tuple(curves)))
    return plots


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all, with the values."""
    keys = sorted({key for config in configs for key in config})
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys, dotted."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


def distinct_names(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Names, or paths if two names are the same."""
    return list(names) if len(set(names)) == len(names) else list(paths)
