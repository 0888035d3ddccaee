"""Runs that fail in known ways, and what ``hpctrain explain`` says of each.

    python -m benchmarks.failures [FOLDER]              # judges the corpus, or one that was made
    python -m benchmarks.failures make FOLDER [--only WORD]    # makes the runs that FOLDER lacks: half an hour
    python -m benchmarks.failures pack FOLDER           # makes FOLDER the corpus

Making needs Linux, root (control groups, mounts, network namespaces), Open MPI and both frameworks.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.failures import corpus, judging
from benchmarks.failures.cases import CASES
from benchmarks.program import start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="make|pack|FOLDER",
        help="FOLDER: judge the runs in it, by default the corpus; make FOLDER: make the runs that it lacks (half an "
        "hour; needs root, Open MPI and both frameworks); pack FOLDER: make it the corpus",
    )
    parser.add_argument("--only", default="", help="runs whose class or name contains this")
    parser.add_argument("--verbose", action="store_true", help="print what explain says of each run")


def run(args: argparse.Namespace) -> int:
    """Makes, packs or judges."""
    command, folder = args.words if len(args.words) == 2 else ("judge", *args.words, "")[:2]
    cases = [case for case in CASES if args.only in f"{case.label}/{case.name}"]
    if command == "make":
        from benchmarks.failures.making import remake

        return 1 if remake(cases, Path(folder)) else 0
    if command == "pack":
        print(f"{corpus.pack(Path(folder)):,} bytes")
        return 0
    with tempfile.TemporaryDirectory(prefix="failures-") as made:
        if not folder:
            corpus.unpack(Path(made))
        place = Path(folder or made)
        there = [case for case in cases if (place / case.label / case.name).exists()]
        return judge([judging.ask(case, place) for case in there], args.verbose)


def judge(answers: list[judging.Answer], verbose: bool) -> int:
    """Prints the matrix and the wrong answers."""
    print(judging.matrix(answers))
    wrong = [answer for answer in answers if answer.wrong]
    print(f"\n{judging.summary(answers)}")
    for answer in answers if verbose else wrong:
        print(f"\n{answer.case.label}/{answer.case.name}: {'; '.join(answer.wrong) or 'right'}\n  {answer.text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(start("failures", "what explain says of runs that fail in known ways", add_arguments, run))
