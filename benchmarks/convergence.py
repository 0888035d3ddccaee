"""Measures what methods that save bytes cost in loss: ``python -m benchmarks.convergence``."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.program import start
from hpctrain.bench.ranks import on_ranks
from hpctrain.errors import ExitCode, UserError
from hpctrain.report import drawing
from hpctrain.system import foreign_text

PROGRAM = "benchmarks.torch_convergence"
LOCAL = {"kind": "local", "after_steps": "warm_up"}
DILOCO = {"every_steps": 32, "outer_lr": 0.7, "outer_momentum": 0.9}
EVERY, APART, FROM_APART = "every step", "isolated", "isolated after warm-up"
METHODS: dict[str, dict[str, Any]] = {
    EVERY: {},
    APART: {"isolated": True, "share": 0.0},
    FROM_APART: {"sync": {**LOCAL, "every_steps": 10**9}, "share": 0.0},
    "fp16": {"reduce": {"compression": "fp16"}, "share": 0.5},
    "local 32": {"sync": {**LOCAL, "every_steps": 32}, "share": 1 / 32},
    "overlap": {"sync": {**LOCAL, "every_steps": 32, "overlap": True}, "share": 1 / 32},
    "averaging 32": {"sync": {**LOCAL, "every_steps": 32, "outer_momentum": 0.0}, "share": 1 / 32},
    "DiLoCo 32": {"sync": {**LOCAL, **DILOCO}, "share": 1 / 32},
    "DiLoCo 32 cold": {"sync": {"kind": "local", **DILOCO}, "share": 1 / 32},
}
"""Sections of a run file, and the fraction of fp32's bytes that is sent; ``warm_up`` is replaced by its steps."""


@dataclass(frozen=True)
class Row:
    """One run."""

    method: str
    seed: int
    ranks: int
    loss: float
    """Final loss on fixed validation data; the mean over isolated replicas."""
    bytes_sent: float
    """Bytes sent by a rank."""
    seconds: float
    """Seconds of all steps on this machine."""
    curve: Sequence[Sequence[float]]
    """(step, loss, bytes, seconds)."""


@dataclass(frozen=True)
class Summary:
    """One method, over all seeds."""

    method: str
    loss: float
    spread: float
    """Standard deviation over the seeds of the difference in loss from "every step" with the same seed."""
    lost: float
    """Fraction of the benefit of communication that is lost: 0 as with every step, 1 as with isolated replicas."""
    lost_after: float
    """The same for the benefit after the warm-up; for methods that start with a warm-up."""
    bytes_share: float
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", default=",".join(METHODS), help=f"comma-separated: {', '.join(METHODS)}")
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (default: 3)")
    parser.add_argument("--steps", type=int, default=600, help="updates of a run (default: 600)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 64 characters of a rank (default: 4)")
    parser.add_argument("--width", type=int, default=64, help="of the GPT (default: 64)")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest learning rate (default: 3e-3)")
    parser.add_argument("--warm-up", type=float, default=1 / 3, help="share of exact steps at first (default: 1/3)")
    parser.add_argument("--decay", choices=("cosine", "none"), default="cosine", help="of the rate (default: cosine)")
    parser.add_argument("--kept", type=Path, help="file of runs: those in it are not made again, new ones join it")
    parser.add_argument("--picture", type=Path, help="draw the curves here (.svg, .png)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    names = list(dict.fromkeys([EVERY, APART, FROM_APART, *args.methods.split(",")]))
    if unknown := [name for name in names if name not in METHODS]:
        raise UserError(f"there is no method {unknown[0]!r}", f"choose among {', '.join(METHODS)}")
    options = {
        f"--{key}": str(getattr(args, key.replace("-", "_")))
        for key in ("steps", "batch", "width", "warm-up", "lr", "decay")
    }
    kept = json.loads(args.kept.read_text()) if args.kept and args.kept.exists() else []
    there = {(row["method"], row["seed"]) for row in kept}
    missing = [f"{name}:{seed}" for seed in range(args.seeds) for name in names if (name, seed) not in there]
    if missing:
        kept += on_ranks(PROGRAM, {**options, "--runs": ",".join(missing)}, args.ranks)
    if args.kept:
        args.kept.write_text(json.dumps(kept))
    rows = [row for row in (Row(**row) for row in kept) if row.method in names and row.seed < args.seeds]
    found = summaries(rows, names)
    if args.picture:
        draw(rows, names, args.picture)
    text = json.dumps({"rows": [asdict(row) for row in rows], "summaries": [asdict(one) for one in found]})
    foreign_text.show(text if args.json else table(found))
    return ExitCode.DONE


def summaries(rows: Sequence[Row], names: Sequence[str]) -> list[Summary]:
    """Summarizes each method; runs are compared with those of the same seed."""
    by_method = {name: {row.seed: row for row in rows if row.method == name} for name in names}
    exact = by_method[EVERY]

    def above(name: str) -> list[float]:
        return [row.loss - exact[seed].loss for seed, row in by_method[name].items()]

    benefit, benefit_after = (statistics.mean(above(name)) for name in (APART, FROM_APART))
    return [
        Summary(
            method=name,
            loss=statistics.mean(row.loss for row in of.values()),
            spread=statistics.stdev(above(name)) if len(of) > 1 else 0.0,
            lost=statistics.mean(above(name)) / benefit,
            lost_after=statistics.mean(above(name)) / benefit_after,
            bytes_share=statistics.mean(row.bytes_sent / exact[seed].bytes_sent for seed, row in of.items()),
            seconds=statistics.mean(row.seconds for row in of.values()),
        )
        for name, of in by_method.items()
    ]


def table(found: Sequence[Summary]) -> str:
    """Formats summaries as a table."""
    head = f"{'method':<24}{'loss':>9}{'spread':>9}{'lost':>8}{'after':>8}{'bytes':>8}{'seconds':>9}"
    lines = [
        f"{one.method:<24}{one.loss:>9.4f}{one.spread:>9.4f}{one.lost:>8.1%}{one.lost_after:>8.1%}"
        f"{one.bytes_share:>8.3f}{one.seconds:>9.1f}"
        for one in found
    ]
    return "\n".join([head, *lines])


def draw(rows: Sequence[Row], names: Sequence[str], path: Path) -> None:
    """Draws the mean loss over updates, and at the end over bytes sent. Raises UserError without matplotlib."""
    drawing.require()
    from matplotlib.figure import Figure

    with drawing.own_settings():
        figure = Figure(figsize=(10, 4), layout="constrained")
        over_updates, at_end = figure.subplots(1, 2)
        ends: list[tuple[float, float]] = []
        for name, colour in zip(names, itertools.cycle(drawing.PALETTE)):
            curves = [row.curve for row in rows if row.method == name]
            points = [[statistics.mean(values) for values in zip(*at, strict=True)] for at in zip(*curves, strict=True)]
            steps, losses, sent, _ = zip(*points, strict=True)
            over_updates.plot(steps, losses, label=name, color=drawing.LIGHT[colour])
            x, y = end = sent[-1] * 1e-6, losses[-1]
            at_end.plot(x, y, "o", color=drawing.LIGHT[colour])
            hides = any(abs(x - a) < 10 and abs(y - b) < 0.01 for a, b in ends)
            side = "right" if hides else "left"
            at_end.annotate(name, end, (-6 if hides else 6, 0), textcoords="offset points", va="center", ha=side)
            ends.append(end)
        over_updates.set(xlabel="updates", ylabel="validation loss, nats per character", yscale="log")
        over_updates.yaxis.set_minor_formatter("{x:.2g}")
        over_updates.legend(fontsize="small")
        at_end.set(xlabel="MB sent by a rank", ylabel="validation loss at the end")
        figure.savefig(path, dpi=160)


if __name__ == "__main__":
    sys.exit(start("convergence", "what methods that save bytes cost in loss", add_arguments, run))
