"""``hpctrain init``: writes a task and a run file to start from."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from hpctrain.errors import ExitCode, UserError, file_errors
from hpctrain.system import foreign_text
from hpctrain.system.python import version_of

FRAMEWORKS = {"torch": "torch", "keras": "tensorflow"}
"""Prefixes of the files in ``starters``, which is a link to ``examples/starters``."""
KINDS = ("image", "text", "table", "steps")
RUN_FILE = """\
name: {name}
task: {name}.py:task
task_args: {{lr: 0.003}}  # arguments of the task function

train:
  epochs: 5
  global_batch: 64  # samples of one update, shared between the ranks
{reported}schedule:
  kind: cosine
  warmup_epochs: 1
checkpoint:
  every_epochs: 1
  best_metric: {metric}
  best_mode: {mode}
# all other keys: hpctrain keys
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the run; NAME.py and NAME.yaml are written")
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), default="torch", help="by default torch")
    kinds = "what a sample is, by default a row of a table; steps: two networks trained in turn by a custom step"
    parser.add_argument("--kind", choices=KINDS, default="table", help=kinds)
    parser.add_argument("--folder", default=".", help="folder of the files; by default the current one")


def run(args: argparse.Namespace) -> int:
    """Writes both files, unless one of them exists."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,80}", args.name):
        fix = "use letters, digits and underscores, beginning with a letter"
        raise UserError(f"{args.name!r} cannot be the name of a Python file", fix)
    if args.name in (*sys.stdlib_module_names, *FRAMEWORKS, *FRAMEWORKS.values()) or version_of(args.name):
        raise UserError(f"{args.name} is the name of a Python module, which the task would replace", "choose another")
    folder = Path(args.folder)
    starter = Path(__file__).parent / "starters" / f"{FRAMEWORKS[args.framework]}_{args.kind}.py"
    metric, mode = ("error", "min") if args.kind in ("table", "steps") else ("accuracy", "max")
    reported = "" if args.kind == "steps" else f"  metrics: [{metric}]  # of training batches too, next to the loss\n"
    texts = {
        folder / f"{args.name}.py": starter.read_text(encoding="utf-8"),
        folder / f"{args.name}.yaml": RUN_FILE.format(name=args.name, metric=metric, mode=mode, reported=reported),
    }
    there = [path for path in texts if path.exists()]
    if there:
        raise UserError(f"{there[0]} exists already", "choose another name or --folder")
    with file_errors(f"{folder} cannot be written", "choose another --folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
    there_first = "" if args.folder == "." else f"cd {shlex.quote(args.folder)}; "
    foreign_text.show(
        f"wrote {folder / args.name}.py (the task) and {folder / args.name}.yaml (the run file); next:\n"
        f"  {there_first}hpctrain doctor {args.name}.yaml      # tries the task on one batch\n"
        f"  {there_first}hpctrain run -n 2 {args.name}.yaml    # trains it on two ranks"
    )
    return ExitCode.DONE
