"""How long a training step takes with each way of exchanging gradients: ``hpctrain bench step``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hpctrain.bench.ranks import on_ranks
from hpctrain.errors import ExitCode, UserError
from hpctrain.system import foreign_text

FRAMEWORKS = {"torch": "hpctrain.bench.torch_step", "tensorflow": "hpctrain.bench.tensorflow_step"}
"""Program of each framework; it is started on every rank with the same arguments and rank 0 writes the rows."""
CONTENDERS = {
    "torch": ("none", "auto", "horovod", "mpi", "ddp", "horovod-plain"),
    "tensorflow": ("none", "auto", "horovod", "mpi", "mwms", "horovod-plain"),
}
MODELS = {"torch": ("gpt", "mlp", "conv"), "tensorflow": ("gpt", "mlp", "conv", "lstm", "small", "wide")}
ADAM = "mlp-adam"
"""The mlp by an optimizer that has more state; only if it is named."""
TABLES = ("tables-sgd", "tables-adagrad", "tables-adam")
"""A large table by an optimizer; only if they are named."""


@dataclass(frozen=True)
class Row:
    """One contender on one model."""

    framework: str
    model: str
    contender: str
    median_ms: float
    """Median step, of the slowest rank."""
    ratio_to_none: float | None
    """To the step without any exchange, in the same run."""
    weights_equal: bool
    """Whether all ranks held the same weights after each timed run, bit for bit; without an exchange they cannot."""
    choice: str | None = None
    """What ``auto`` chose."""


def rows(
    framework: str, model: str, times_s: dict[str, float], equal: dict[str, bool], choice: str | None
) -> list[Row]:
    """Rows of one model from the contenders' median step times."""
    limit = times_s.get("none")
    return [
        Row(
            framework,
            model,
            contender,
            round(seconds * 1e3, 3),
            round(seconds / limit, 4) if limit else None,
            equal[contender],
            choice if contender == "auto" else None,
        )
        for contender, seconds in times_s.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--framework", choices=[*FRAMEWORKS, "all"], default="torch", help="whose step (default: torch)"
    )
    parser.add_argument(
        "--models",
        default="",
        help="comma-separated among gpt, mlp, conv, in Keras lstm, small, wide (default: all these), and mlp-adam, "
        "tables-sgd, tables-adagrad, tables-adam (one of 500,000 x 16)",
    )
    parser.add_argument(
        "--contenders",
        default="",
        help="comma-separated: none, plain, auto, horovod, mpi, sharded, tables, densify, ddp, zero, mwms, "
        "horovod-plain, or a way (mpi-flat-fp16)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine, one thread each (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a turn (default: 12)")
    parser.add_argument(
        "--compression",
        choices=("none", "fp16", "auto"),
        default="none",
        help="what auto may choose from (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if min(args.ranks, args.rounds, args.steps) < 1:
        raise UserError("--ranks, --rounds and --steps must be 1 or more", "give positive numbers")
    frameworks = list(FRAMEWORKS) if args.framework == "all" else [args.framework]
    found: list[Row] = []
    for framework in frameworks:
        models = _chosen(args.models, MODELS[framework], len(frameworks) > 1) if args.models else MODELS[framework]
        contenders = args.contenders.split(",") if args.contenders else list(CONTENDERS[framework])
        found += measure(framework, models, contenders, args.ranks, args.rounds, args.steps, args.compression)
    if args.json:
        foreign_text.show(json.dumps({"rows": [asdict(row) for row in found]}))
    else:
        foreign_text.show(table(found))
    return ExitCode.DONE


def measure(
    framework: str,
    models: Sequence[str],
    contenders: Sequence[str],
    ranks: int,
    rounds: int,
    steps: int,
    compression: str,
) -> list[Row]:
    """Runs the framework's program on ranks of this machine. All contenders take turns within it.

    Raises:
        RunFailed: the program failed.
    """
    options = {
        "--models": ",".join(models),
        "--contenders": ",".join(contenders),
        "--rounds": str(rounds),
        "--steps": str(steps),
        "--compression": compression,
    }
    return [Row(**row) for row in on_ranks(FRAMEWORKS[framework], options, ranks)]


def table(found: Sequence[Row]) -> str:
    """Rows for people."""
    head = f"{'framework':<11}{'model':<15}{'contender':<16}{'median ms':>10}{'to none':>9}  weights"
    lines = [
        f"{row.framework:<11}{row.model:<15}{row.contender:<16}{row.median_ms:>10.2f}"
        + (f"{row.ratio_to_none:>9.2f}" if row.ratio_to_none else f"{'-':>9}")
        + ("  equal" if row.weights_equal else "  differ")
        + (f"  chose {row.choice}" if row.choice else "")
        for row in found
    ]
    return "\n".join([head, *lines])


def parser_of_ranks() -> argparse.ArgumentParser:
    """The arguments that each framework's program gets."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--models", "--contenders", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compression", default="none")
    return parser


def _chosen(given: str, models: Sequence[str], skip_unknown: bool) -> list[str]:
    names, known = given.split(","), [*models, ADAM, *TABLES]
    unknown = [name for name in names if name not in known]
    if unknown and not skip_unknown:
        raise UserError(f"no benchmark model {unknown[0]!r}", f"choose among {', '.join(known)}")
    return [name for name in names if name in known]
