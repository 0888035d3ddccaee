"""Starts a benchmark from its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from hpctrain.cli import Parser, say
from hpctrain.errors import HpctrainError


def start(
    name: str,
    about: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> int:
    """Parses the command line and runs the benchmark; returns its exit code.

    Args:
        name: name after ``python -m benchmarks.``.
        about: one sentence for ``--help``.
        add_arguments: adds the options.
        run: measures and prints.
    """
    parser = Parser(prog=f"python -m benchmarks.{name}", description=about, allow_abbrev=False)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except HpctrainError as error:
        say(str(error))
        return error.exit_code
