"""``hpctrain node``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hpctrain.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See api of commands in ``cli``."""
    parser.add_argument(
        "ticket", type=Path, nargs="?", help="launch.ticket of the run; by default HPCTRAIN_NODE_KEY says"
    )
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="longest wait for the run, in seconds")
    parser.epilog = "Runs on each node until the run is over. hpctrain run has launch.engine: runners."


def run(args: argparse.Namespace) -> int:
    """Serves one run; an ExitCode."""
    from hpctrain.errors import UserError
    from hpctrain.launch.runners import node, ticket

    given = ticket.of_environment(os.environ)
    if given is None and args.ticket is None:
        raise UserError("node: no ticket given", f"name the file of launch.ticket, or set {ticket.KEY}")
    node.run(lambda: given or ticket.read(args.ticket), args.wait)
    return ExitCode.DONE
