"""``hpctrain nodes``: nodes that are left out, and why."""

from __future__ import annotations

import argparse
import dataclasses
import time

from hpctrain.commands.slurm import show
from hpctrain.errors import ExitCode, UserError
from hpctrain.run import bad_nodes, which


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.py."""
    parser.add_argument("target", metavar="run", nargs="?", help="run file or run folder; else the list of all runs")
    parser.add_argument("--clear", metavar="NODE", help="take a node, or all, off the list")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """See cli.py."""
    nodes = bad_nodes.of_run(which.configured(args.target, [])[1]) if args.target else bad_nodes.shared()
    now = time.time()
    if args.clear:
        entries = nodes.clear(args.clear, now)
        if not entries and args.clear != "all":
            raise UserError(f"{args.clear} is not left out", "hpctrain nodes lists those that are")
    else:
        entries = nodes.entries(now)
    how = "cleared, was to be left out" if args.clear else "left out"
    text = [f"{each.node}: {how} for {(each.until - now) / 3600:.1f} h more: {each.reason}" for each in entries]
    show(args, [dataclasses.asdict(each) for each in entries], text or ["no node is left out"])
    return ExitCode.DONE
