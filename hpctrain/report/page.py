"""The HTML report: one self-contained file with inline charts and a table for each; without matplotlib, only tables."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from hpctrain.errors import file_errors
from hpctrain.report import charts
from hpctrain.report.drawing import DARK, INSTALL, LIGHT, can_draw, inline, picture, require
from hpctrain.report.explain import Explanation
from hpctrain.report.plots import ReportSection, line_sections, phase_section, shrink, time_unit
from hpctrain.report.summary import Span, make_spans, summarize
from hpctrain.run.events import CheckpointFailed, CheckpointSaved, Event, Hang, Recovered, Straggler
from hpctrain.run.figures import Curve, Figure, Figures, Picture
from hpctrain.run.history import RunHistory
from hpctrain.system import quantities
from hpctrain.system.array_types import Floats


def make_sections(
    data: RunHistory,
    figures: Figures | None = None,
    excess: Floats | None = None,
) -> list[ReportSection]:
    """Makes all sections of one run's report.

    Args:
        data: the run's history.
        figures: curves and matrices of the newest evaluation.
        excess: float64[ranks, windows] as the monitor saved it.
    """
    attempts = make_spans(data)
    sections = line_sections(data, attempts)
    if figures is not None:
        sections += [_figure(name, figure, figures.step) for name, figure in figures.figures.items()]
    sections += [phases] if (phases := phase_section(data)) else []
    if excess is not None and not data.run.account.is_short:
        sections.append(_heat(shrink(100 * excess)))
    return [*sections, _attempts(attempts)] if attempts else sections


def render(
    data: RunHistory,
    explanation: Explanation,
    sections: Sequence[ReportSection],
    pictures: Sequence[Picture] = (),
    folder: Path | None = None,
) -> str:
    """Renders the page of one run, with what ended or slows it, for a ``folder``; by default the run's."""
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            summary=summarize(data),
            explanation=explanation,
            short=data.run.account.is_short,
            sections=sections,
            pictures=pictures,
            checkpoints=[_row(event, CHECKPOINT) for event in data.all(CheckpointSaved)],
            failures=[_row(event, ("step", "path", "error")) for event in data.all(CheckpointFailed)],
            stragglers=[_row(event, STRAGGLER) for event in data.all(Straggler)],
            hangs=[_row(event, HANG) for event in data.all(Hang)],
            recoveries=[_row(event, RECOVERY) for event in data.all(Recovered)],
            files=kept_files(data.run.path, folder or data.run.path),
            config=json.dumps(data.run.config, indent=2),
        )
    )


def kept_files(run: Path, folder: Path) -> list[tuple[str, str]]:
    """Paths of the run's traces and memory snapshots, relative to the page's folder, and what opens them."""
    viewers = {"profile/*.json": "ui.perfetto.dev", "monitor/memory-*.pickle": "pytorch.org/memory_viz"}
    found = [(path, viewer) for pattern, viewer in viewers.items() for path in sorted(run.glob(pattern))]
    return [(os.path.relpath(path, folder), viewer) for path, viewer in found]


def render_comparison(
    runs: Sequence[str], tables: Sequence[tuple[str, Sequence[Sequence[str]]]], sections: Sequence[ReportSection]
) -> str:
    """Renders the page of several runs: titled tables with a column for each, and curves overlaid."""
    return _environment().get_template("compare.html.j2").render(runs=runs, tables=tables, sections=sections)


def save_pictures(sections: Sequence[ReportSection], folder: Path) -> list[Path]:
    """Writes each chart to a folder as an SVG file; returns the paths.

    Raises:
        UserError: matplotlib is missing, or the folder cannot be created or written.
    """
    require()
    paths = [folder / f"{section.key}.svg" for section in sections]
    with file_errors(f"pictures cannot be written into {folder}", "name a folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, section in zip(paths, sections, strict=True):
            path.write_text(picture([section.chart]), encoding="utf-8")
    return paths


CHECKPOINT = ("step", "bytes", "stall_s", "write_s", "path")
STRAGGLER = ("step", "rank", "host", "cause", "slowdown", "cost", "state", "sentence")
RECOVERY = ("attempt", "step", "rank", "host", "code", "seconds", "repeated_steps", "reason")
HANG = ("attempt", "step", "kind", "silence_s", "sentence")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpctrain.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"light": LIGHT, "dark": DARK, "install": "" if can_draw() else INSTALL}
    environment.filters["drawn"] = inline
    environment.filters["number"] = number
    environment.filters["exact"] = exact
    environment.filters["moment"] = moment
    return environment


def number(value: Any, key: str = "") -> str:
    """Formats a value for a table: with its key's unit, or with four significant digits; a dash for None."""
    if value is None:
        return "–"
    if (shown := quantities.quantity(key, value)) is not None:
        return shown
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value).replace("_", " ") if key == "state" else str(value)
    return str(value) if isinstance(value, int) else quantities.number(value)


def exact(value: Any) -> str:
    """Formats a plotted value without loss of precision."""
    if value is None:
        return "–"
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def moment(seconds: float | None) -> str:
    """Formats Unix seconds as date and time in UTC."""
    if not seconds:
        return "–"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _figure(name: str, figure: Figure, step: int) -> ReportSection:
    key = re.sub(r"[^\w-]+", "_", f"metric_{name}")
    title = f"Validation {name} at step {step}"
    if isinstance(figure, Curve):
        x, y = figure.x, figure.y
        axes = f"across: {figure.x_label}; up: {figure.y_label}"
        chart = charts.line_chart(title, [charts.ChartLine(name, x, y)], axes, from_zero=True)
        return ReportSection(key, chart, (figure.x_label, figure.y_label), [*zip(x, y, strict=True)])
    labels, counts = figure.labels, figure.counts
    header = ("true class", *(f"taken for {label}" for label in labels))
    rows = [(label, *row) for label, row in zip(labels, counts, strict=True)]
    return ReportSection(key, charts.confusion_chart(title, labels, counts), header, rows)


def _heat(values: Floats) -> ReportSection:
    chart = charts.heat_chart("Busy time compared with the other ranks", values)
    rows = [(rank, *_spread(row)) for rank, row in enumerate(values)]
    return ReportSection("heat", chart, ("row", "median (%)", "max (%)"), rows)


def _spread(row: Floats) -> tuple[float | None, float | None]:
    finite = row[np.isfinite(row)]
    return (float(np.median(finite)), float(finite.max())) if finite.size else (None, None)


def _attempts(attempts: Sequence[Span]) -> ReportSection:
    first = attempts[0].begin
    unit, unit_name = time_unit(attempts[-1].end - first)
    bars = [
        charts.Bar(
            f"attempt {attempt.number}, from step {attempt.from_step}: {attempt.ending}",
            (attempt.begin - first) / unit,
            (attempt.end - first) / unit,
            attempt.orderly,
        )
        for attempt in attempts
    ]
    rows = [(a.number, moment(a.begin), moment(a.end), a.from_step, a.to_step, a.ending) for a in attempts]
    header = ("attempt", "began", "ended", "from step", "newest checkpoint", "how it ended")
    return ReportSection("attempts", charts.time_chart("Attempts", bars, unit_name), header, rows)


def _row(event: Event, keys: Sequence[str]) -> dict[str, Any]:
    fields = event.to_json()
    return {key: fields[key] for key in keys}
