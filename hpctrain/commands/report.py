"""``hpctrain report``, ``explain``, ``compare`` and ``watch``."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.run import resolve_run
from hpctrain.run.run_view import RunView
from hpctrain.system import foreign_text
from hpctrain.system.files import replace_whole

if TYPE_CHECKING:
    from hpctrain.run.history import RunHistory

MOST_CHARACTERS = 20_000
"""Maximum length of an explanation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the parser's command."""
    command = parser.get_default("command")
    many = command == "compare"
    parser.add_argument("runs" if many else "run", nargs="+" if many else None, help="run folder or run file")
    what = "one snapshot as JSON" if command == "watch" else "JSON"
    parser.add_argument("--json", action="store_true", help=f"print {what}")
    if command == "watch":
        parser.add_argument(
            "--once", action="store_true", help="print one snapshot and exit (the default without a terminal)"
        )
    if command in ("report", "compare"):
        parser.add_argument(
            "-o",
            "--output",
            help="HTML file; by default report.html in the run folder" if not many else "write an HTML page",
        )
    if command == "report":
        parser.add_argument("--svg", metavar="FOLDER", help="write each chart as an SVG file into this folder, too")


def run(args: argparse.Namespace) -> int:
    """Runs the command; an exit code."""
    return {"report": report, "explain": explain, "compare": compare, "watch": watch}[args.command](args)


def report(args: argparse.Namespace) -> int:
    """Writes one HTML file, and SVG files if requested, or prints JSON."""
    from hpctrain.report import page
    from hpctrain.report.explain import explain as explain_run
    from hpctrain.report.summary import summarize

    view = find_run(args.run)
    data = view.history()
    show_notes(data)
    if args.json:
        foreign_text.show(
            json.dumps({**summarize(data), "explanation": asdict(explain_run(data))}, indent=1, default=str)
        )
        return 0
    path = Path(args.output) if args.output else view.path / "report.html"
    sections = page.make_sections(data, view.figures(), view.heat_map())
    html = page.render(data, explain_run(data), sections, view.pictures(), path.parent)
    write_page(path, html)
    foreign_text.show(str(path))
    show_charts_missing()
    if args.svg:
        for picture in page.save_pictures(sections, Path(args.svg)):
            foreign_text.show(str(picture))
    return 0


def write_page(path: Path, html: str) -> None:
    """Writes a page, with escapes for what is not Unicode: a path may have any bytes. Raises UserError."""
    replace_whole(path, lambda temporary: temporary.write_bytes(html.encode(errors="backslashreplace")))


def explain(args: argparse.Namespace) -> int:
    """Prints one paragraph; for an array, one for all elements with the same explanation."""
    from rich.console import Console

    from hpctrain.launch.engines import status
    from hpctrain.report.explain import explain as explain_run

    runs = resolve_run.runs(args.run)
    jobs = status.ask(runs)
    answers = {}
    for run in runs:
        data = RunView(run.path).history()
        show_notes(data)
        answers[run.path] = explain_run(data, data.run.state(time.time(), jobs.job_of(run)))
    of_array = bool(runs) and runs[0].path != resolve_run.existing(args.run).path
    if args.json:
        said = [{"run": str(path), **asdict(answer)} for path, answer in answers.items()]
        foreign_text.show(json.dumps(said if of_array else asdict(answers[runs[0].path]), indent=1))
        return 0
    alike: dict[str, list[str]] = {}
    for path, answer in answers.items():
        alike.setdefault(f"{answer.title}. {answer.text}".strip(), []).append(path.name)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    for text, names in alike.items():
        console.print(foreign_text.line(f"{', '.join(names)}: {text}" if of_array else text, MOST_CHARACTERS))
    return 0


def compare(args: argparse.Namespace) -> int:
    """Prints tables, and writes an HTML file with overlays if requested."""
    from hpctrain.report import page
    from hpctrain.report.compare import compare as compare_runs
    from hpctrain.report.compare import overlays, tables

    runs = [find_run(name).history() for name in args.runs]
    show_notes(*runs)
    result = compare_runs(runs)
    if args.json:
        foreign_text.show(json.dumps(result, indent=1, default=str))
    else:
        for title, rows in tables(result):
            foreign_text.table(title, ["", *result["runs"]], rows)
    if args.output:
        html = page.render_comparison(result["runs"], tables(result), overlays(runs, result["runs"]))
        write_page(Path(args.output), html)
        foreign_text.show(args.output)
        show_charts_missing()
    return 0


def show_charts_missing() -> None:
    """Warns that a page has no charts, with the fix."""
    from hpctrain.report.drawing import INSTALL, can_draw

    if not can_draw():
        foreign_text.show(f"hpctrain: the page has no charts, which need matplotlib\n  fix: {INSTALL}", sys.stderr)


def show_notes(*runs: RunHistory) -> None:
    """Warns once about events that were left out of the run folders."""
    for found in (data.run for data in runs if data.run.left_out):
        foreign_text.show(f"hpctrain: {found.path}: {found.left_out}", sys.stderr)


def find_run(name: str) -> RunView:
    """Returns the run that is named. Raises UserError if it does not exist or is an array."""
    resolve_run.existing(name)
    return RunView(resolve_run.single(name).path)


def watch(args: argparse.Namespace) -> int:
    """Shows a live view of a run, on any machine that sees its folder. It never writes there."""
    from rich.console import Console

    from hpctrain.watch import terminal
    from hpctrain.watch.terminal import WatchedRun

    source = WatchedRun(RunView(resolve_run.single(args.run).path))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks the characters of bars and curves shows ?
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False, emoji=False)
    if args.json:
        foreign_text.show(json.dumps(source.look(whole=True).plain()))
    elif args.once or not sys.stdout.isatty():
        terminal.print_once(source.look(whole=True), console)
    else:
        terminal.show(source.look, console)
    return 0
