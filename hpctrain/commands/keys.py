"""``hpctrain keys``: what a run file may say."""

from __future__ import annotations

import argparse
import json

from hpctrain.config.reference import help_text, schema
from hpctrain.errors import ExitCode, UserError
from hpctrain.system import foreign_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="only keys whose name or meaning has all these words")
    parser.add_argument("--schema", action="store_true", help="print a JSON Schema of the run file, for editors")


def run(args: argparse.Namespace) -> int:
    """Prints the keys, or the schema."""
    if args.schema:
        foreign_text.show(json.dumps(schema(), indent=1))
        return ExitCode.DONE
    text = help_text(args.words)
    if not text:
        raise UserError(f"no key of the run file has {' and '.join(args.words)}", "hpctrain keys lists all of them")
    foreign_text.show(text, end="")
    return ExitCode.DONE
