"""``hpctrain sweep``: one run for each combination of values, here or as an array of jobs, and a table of results."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.commands.run import start
from hpctrain.config.loading import dump
from hpctrain.errors import ExitCode, UserError
from hpctrain.launch.engines.local import RunRequest
from hpctrain.launch.supervisor import report
from hpctrain.launch.sweep import Point, combinations, points_of
from hpctrain.run import resolve_run
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from hpctrain.run.stop_request import requested_stop
from hpctrain.run.verdict import Action
from hpctrain.system import foreign_text
from hpctrain.system.files import write_atomically
from hpctrain.system.output import say
from hpctrain.system.quantities import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments; see ``cli``."""
    parser.add_argument("run_file", nargs="?", help="YAML run file")
    parser.add_argument(
        "--list", action="append", default=[], metavar="FILE", help="file with one line of options per run"
    )
    parser.add_argument("-n", "--ranks", type=positive, help="ranks of each run on this machine")
    parser.add_argument("--submit", action="store_true", help="submit the runs as one Slurm job array")
    parser.add_argument("--at-once", type=positive, metavar="N", help="with --submit: maximum number of runs at a time")
    parser.add_argument("--dry-run", action="store_true", help="list the runs, with --submit print the script")
    parser.add_argument("--wait", action="store_true", help="with --submit: return when all have ended")
    parser.add_argument("--table", metavar="FOLDER", help="only print the results of the sweep in this folder")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--verbose", action="store_true", help="also show the output of libraries and launchers")
    parser.epilog = "Values separated by commas are swept: hpctrain sweep run.yaml --task_args.lr 1e-3,3e-4 --seed 0,1"
    parser.set_defaults(overrides=[], after=[], chain=1, parsable=False)


def run(args: argparse.Namespace) -> int:
    """Runs what has not finished, and prints the table; returns an exit code."""
    if args.table:
        show_table(args, resolve_run.runs(args.table))
        return ExitCode.DONE
    if args.run_file is None:
        raise UserError("sweep: no run file given", "hpctrain sweep run.yaml --task_args.lr 1e-3,3e-4")
    options = combinations(args.overrides, args.list)
    if len(options) < 2 and not args.list:
        fix = "separate values by commas: --task_args.lr 1e-3,3e-4 --seed 0,1,2; or give --list FILE"
        raise UserError("nothing is swept: no key has several values", fix)
    points = points_of(args.run_file, options)
    left = [point for point in points if not point.is_finished()]
    if args.submit and left:
        return submit(args, left)
    if args.dry_run:
        foreign_text.show("\n".join(f"{point.run.path}: {point.label}" for point in left))
        return ExitCode.DONE
    if len(left) < len(points):
        say(f"{len(points) - len(left)} of {len(points)} runs have finished already")
    code = run_here(args, left)
    show_table(args, [point.run for point in points])
    return code


def run_here(args: argparse.Namespace, points: Sequence[Point]) -> int:
    """Runs them one after the other; a failure does not end the others, unless the first cannot start at all."""
    codes: list[int] = []
    for number, point in enumerate(points, 1):
        say(f"run {number} of {len(points)}: {point.label} ({point.run.path})")
        point.run.create()
        write_atomically(point.run.run_yaml, dump(point.config).encode(), point.run.path)
        run_file = str(point.run.run_yaml)
        words = ["train", run_file, *["--verbose"] * args.verbose]
        verdict, count = start(RunRequest(point.config, args.ranks, words, args.verbose))
        report(verdict, point.run, ["hpctrain", "run", *count, run_file])
        codes.append(verdict.exit_code)
        if verdict.action is Action.STOP or requested_stop(point.run) is not None:
            say("the sweep is stopped; the same command resumes it")
            return verdict.exit_code or ExitCode.STOPPED
        if codes == [ExitCode.USER_ERROR]:
            break
    return next((code for code in codes if code != ExitCode.DONE), ExitCode.DONE)


def submit(args: argparse.Namespace, points: Sequence[Point]) -> int:
    """Submits them as one array, whose elements have the numbers of the points."""
    from hpctrain.commands.jobs import send
    from hpctrain.launch.engines.jobs import SubmitOptions

    folder = RunDir(points[0].run.path.parent)
    configs = [point.config for point in points]
    base = dataclasses.replace(configs[0], name=configs[0].name.rpartition("-")[0])
    return send(args, base, folder, SubmitOptions(configs, args.at_once, after=args.after))


def show_table(args: argparse.Namespace, runs: Sequence[RunDir]) -> None:
    """Prints the results, best first."""
    from hpctrain.report.compare import sweep_table

    found = [RunView(run.path).history() for run in runs]
    checkpoint: Mapping[str, Any] = (found[0].run.config.get("checkpoint") if found else None) or {}
    table = sweep_table(found, checkpoint.get("best_metric"), checkpoint.get("best_mode") or "min")
    if args.json:
        foreign_text.show(json.dumps(table, indent=1, default=str))
        return
    print_table(table)


def print_table(table: Mapping[str, Any]) -> None:
    """Prints a row for each point."""
    from hpctrain.report.compare import label
    from hpctrain.report.page import number

    points = table["points"]
    headers = ["run", *points[0]["configuration"], *map(label, points[0]["results"])] if points else []
    cells = [{**point["configuration"], **point["results"]} for point in points]
    rows = [
        [point["point"], *(number(value, key) for key, value in own.items())]
        for point, own in zip(points, cells, strict=True)
    ]
    foreign_text.table(f"Best {label(table['ranked_by'])} first", headers, rows)
