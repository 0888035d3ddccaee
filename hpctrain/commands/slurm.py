"""``hpctrain render | submit | status | logs | stop | cancel | resume``: all take a run file or a run folder."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from typing import Any

from hpctrain.system import foreign_text

FUNCTIONS = {
    "render": "slurm_submit:render",
    "submit": "slurm_submit:submit",
    "resume": "slurm_submit:submit",
    "status": "slurm_status:status",
    "logs": "slurm_status:logs",
    "stop": "slurm_end:stop",
    "cancel": "slurm_end:cancel",
}
"""Module of this package and function behind each command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    name = parser.get_default("command")
    if name == "status":
        parser.add_argument("target", metavar="run", nargs="?", help="run file or run folder; by default all your runs")
    else:
        parser.add_argument("target", metavar="run", help="run file or run folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if name in ("render", "submit", "resume"):
        parser.set_defaults(overrides=[])
        parser.epilog = "Any key of the run file can be given as an option that wins over it: --launch.nodes 4"
    if name == "render":
        parser.add_argument("--portable", action="store_true", help="a script that takes any run file as its argument")
    if name in ("render", "submit"):
        parser.add_argument(
            "--array", action="append", default=[], metavar="SWEEP", help="file of options, or key=v1,v2"
        )
        parser.add_argument("--at-once", type=int, metavar="N", help="elements of the array that run at the same time")
    if name in ("submit", "resume"):
        parser.add_argument("--dry-run", action="store_true", help="print the script and what would be run")
        parser.add_argument(
            "--chain", type=int, default=1, metavar="N", help="N jobs that follow each other, no requeue"
        )
        parser.add_argument("--exclude", action="append", default=[], metavar="HOST", help="hosts not to use")
        parser.add_argument("--after", action="append", default=[], metavar="JOB", help="start when these ended well")
        parser.add_argument("--wait", action="store_true", help="return when the run has ended")
        parser.add_argument("--parsable", action="store_true", help="print the job id only")
    if name == "logs":
        parser.add_argument("--rank", help="a rank's number, or 'job' for the job's own log")
        parser.add_argument("--attempt", type=int, help="an earlier attempt's number")
        parser.add_argument("--follow", action="store_true", help="keep printing until the job ends")
        parser.add_argument("--first-error", action="store_true", help="only the log that shows the first error")


def run(args: argparse.Namespace) -> int:
    module, function = FUNCTIONS[args.command].split(":")
    return int(getattr(importlib.import_module(f"hpctrain.commands.{module}"), function)(args))


def show(args: argparse.Namespace, data: Any, text: Sequence[str]) -> None:
    """Prints one of the two."""
    foreign_text.show(json.dumps(data) if args.json else "\n".join(text))
