"""``hpctrain watch``: the live view of a run, from any machine that sees its folder. It never writes there."""

from __future__ import annotations

import argparse
import json
import sys

from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run file or run folder")
    parser.add_argument("--once", action="store_true", help="print one snapshot and end; so it is without a terminal")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from hpctrain.run import RunView, which
    from hpctrain.watch import terminal
    from hpctrain.watch.source import Source

    source = Source(RunView(which.single(args.run).path))
    console = Console(highlight=False, emoji=False)
    if args.json:
        foreign_text.show(json.dumps(source.look(whole=True).plain()))
    elif args.once or not sys.stdout.isatty():
        terminal.print_once(source.look(whole=True), console)
    else:
        terminal.show(source.look, console)
    return ExitCode.DONE
