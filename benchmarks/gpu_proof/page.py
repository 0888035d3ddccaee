"""Formats the results as Markdown."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.gpu_proof.launch import Found


def line(found: Found) -> str:
    """Formats a row's result for the terminal."""
    said = found.reason or figures(found.figures)
    return f"{found.status:<8}{found.name:<22}{found.seconds:>6.1f} s  {said}"


def figures(named: dict[str, Any]) -> str:
    """Formats figures on one line."""
    return ", ".join(f"{name.replace('_', ' ')} {short(value)}" for name, value in named.items())


def short(value: Any) -> str:
    """Formats a figure with up to four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(result: dict[str, Any]) -> str:
    """Numbers of rows by status."""
    counts = Counter(row["status"] for row in result["rows"])
    told = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))
    return f"{told}, in {result['seconds']:.0f} s"


def page(result: dict[str, Any]) -> str:
    """Makes the whole page."""
    machine = "\n".join(f"- {name}: {value}" for name, value in result["machine"].items())
    rows = "\n".join(
        f"| {row['name']} | {row['what']} | {row['status']} | {row['seconds']:.1f} | "
        f"{cell(row['reason'] or figures(row['figures']))} |"
        for row in result["rows"]
    )
    traces = "".join(
        f"\n## {row['name']}\n\n```\n{row['traceback'].strip()}\n```\n" for row in result["rows"] if row["traceback"]
    )
    head = "| row | what it shows | status | seconds | figures, or the reason |\n| --- | --- | --- | ---: | --- |"
    return f"# hpctrain on {result['machine']['device']}\n\n{summary(result)}.\n\n{machine}\n\n{head}\n{rows}\n{traces}"


def cell(text: str) -> str:
    """Escapes text for a table cell."""
    return " ".join(text.split()).replace("|", "\\|")
