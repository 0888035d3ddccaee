"""Compares hpctrain's steps with those of other libraries: ``python -m benchmarks.step``."""

from __future__ import annotations

import argparse
import sys

from benchmarks.program import start
from hpctrain.bench import step
from hpctrain.reduce.candidates import EVERY_CANDIDATE

PROGRAM = "benchmarks.step_ranks"
MODELS = {
    "torch": (
        *step.MODELS,
        "lstm",
        "resnet",
        "small",
        "wide",
        "mlp-adam",
        "tables-sgd",
        "tables-adagrad",
        "tables-adam",
    ),
    "tensorflow": (*step.MODELS, "lstm", "small", "wide", "tables-sgd", "tables-adagrad", "tables-adam"),
}
"""mlp-adam is mlp with an optimizer with more state; tables-* is a table of 500,000 x 16 with the named optimizer."""
OTHERS = {
    "torch": ("plain", "sharded", "densify", "ddp", "ddp-fp16", "zero", "horovod-plain"),
    "tensorflow": ("plain", "densify", "mwms", "horovod-plain"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = dict.fromkeys(name for names in MODELS.values() for name in names)
    others = dict.fromkeys(name for names in OTHERS.values() for name in names)
    step.add_options(parser, step.FRAMEWORKS, list(models), (*step.CONTENDERS, *others))
    parser.set_defaults(models="", contenders="")


def run(args: argparse.Namespace) -> int:
    models, others = MODELS[args.framework], OTHERS[args.framework]
    args.models = args.models or ",".join(name for name in models if "-" not in name)
    theirs = [name for name in others if name in ("ddp", "mwms", "horovod-plain")]
    args.contenders = args.contenders or ",".join((*step.CONTENDERS, *theirs))
    ways = (candidate.name for candidate in EVERY_CANDIDATE)
    return step.measure(PROGRAM, args, (args.framework,), models, (*step.CONTENDERS, *others, *ways))


if __name__ == "__main__":
    sys.exit(start("step", "the step of hpctrain, compared with those of other libraries", add_arguments, run))
