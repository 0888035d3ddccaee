"""Compares steps under each plan of ``parallel`` with one process and PyTorch: ``python -m benchmarks.parallel``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from benchmarks.program import start
from hpctrain.bench.ranks import on_ranks
from hpctrain.errors import ExitCode, UserError
from hpctrain.system import foreign_text

PROGRAM = "benchmarks.torch_parallel"
OURS = ("one", "one-wide", "mpi", "sharded", "gradients", "tensor", "pipeline", "interleaved", "parameters")
THEIRS = ("ddp", "zero", "dtensor", "torch-pipeline", "fsdp")
MODELS = {"small": (256, 6), "large": (512, 12)}
"""Width and number of blocks; 5 and 38 million parameters."""
HEADS = 8
"""Attention heads of each block."""


@dataclass(frozen=True)
class Row:
    """One plan."""

    contender: str
    median_ms: float
    """Median step of the slowest rank, in ms."""
    ratio_to_one: float | None
    """Ratio to the step of one process with one thread in the same run."""
    loss: float
    """Loss of the last step; equal for all up to rounding, since all train on the same samples."""
    peak_mib: float | None = None
    """Peak resident memory of a rank (VmHWM), measured in a separate run."""
    exchange: float | None = None
    """Median fraction of a step that the rank that waits most spends exchanging or waiting; only for our plans."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=tuple(MODELS), default="small", help="GPT of 5 or 38 M parameters (default: small)"
    )
    parser.add_argument(
        "--contenders",
        default=",".join((*OURS, *THEIRS)),
        help=f"comma-separated: {', '.join(OURS)}, and of torch {', '.join(THEIRS)} (default: all)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens in a step (default: 16)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a pipeline (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn (default: 5)")
    parser.add_argument(
        "--memory", action="store_true", help="also measure peak memory, in a launch for each contender"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    names = chosen(args)
    options = {
        "--model": args.model,
        "--batch": str(args.batch),
        "--micro-batches": str(args.micro_batches),
        "--rounds": str(args.rounds),
        "--steps": str(args.steps),
    }
    found = [Row(**row) for row in on_ranks(PROGRAM, {**options, "--contenders": ",".join(names)}, args.ranks)]
    if args.memory:
        once = {**options, "--rounds": "1", "--steps": "1", "--memory": "yes"}
        peaks = {name: on_ranks(PROGRAM, {**once, "--contenders": name}, args.ranks)[0]["peak_mib"] for name in names}
        found = [Row(**{**asdict(row), "peak_mib": peaks[row.contender]}) for row in found]
    text = json.dumps({"rows": [asdict(row) for row in found]}) if args.json else table(found)
    foreign_text.show(text)
    return ExitCode.DONE


def chosen(args: argparse.Namespace) -> list[str]:
    """Returns the contenders. Raises UserError if one is unknown or the problem cannot be divided."""
    names = list(dict.fromkeys(args.contenders.split(",")))
    unknown = [name for name in names if name not in (*OURS, *THEIRS)]
    if unknown:
        raise UserError(f"there is no contender {unknown[0]!r}", f"choose among {', '.join((*OURS, *THEIRS))}")
    numbers = {"--batch": args.batch, "--micro-batches": args.micro_batches, "--rounds": args.rounds}
    for name, value in {**numbers, "--steps": args.steps}.items():
        if value < 1:
            raise UserError(f"{name} is {value}", "give 1 or more")
    _, blocks = MODELS[args.model]
    able = [ranks for ranks in range(2, blocks + 1) if HEADS % ranks == 0]
    if args.ranks not in able:
        raise UserError(
            f"--ranks {args.ranks} cannot have {HEADS} heads divided equally and at least one of {blocks} blocks each",
            f"give --ranks {' or '.join(map(str, able))}",
        )
    if args.batch % (args.ranks * args.micro_batches):
        raise UserError(
            f"--batch {args.batch} does not divide into {args.micro_batches} micro-batches on {args.ranks} ranks",
            f"give a multiple of {args.ranks * args.micro_batches}",
        )
    return names


def table(found: list[Row]) -> str:
    """Formats rows as a table."""
    head = f"{'contender':<16}{'median ms':>10}{'to one':>8}{'exchange':>10}{'peak MiB':>10}{'loss':>12}"
    lines = [
        f"{row.contender:<16}{row.median_ms:>10.1f}"
        + (f"{row.ratio_to_one:>8.2f}" if row.ratio_to_one else f"{'-':>8}")
        + (f"{row.exchange:>10.0%}" if row.exchange is not None else f"{'-':>10}")
        + (f"{row.peak_mib:>10.0f}" if row.peak_mib else f"{'-':>10}")
        + f"{row.loss:>12.6f}"
        for row in found
    ]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    sys.exit(
        start("parallel", "the step under each plan, compared with one process and PyTorch's own", add_arguments, run)
    )
