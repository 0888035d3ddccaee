"""``hpctrain bench scaling``: measures a run at several sizes and recommends how many ranks are worth using."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.bench import scaling_report as report
from hpctrain.bench import scaling_runs as runs
from hpctrain.bench.scaling_model import Mode, RingLink, Sample, Shape, StepGradients, Timing
from hpctrain.config.loading import add_run_file, load
from hpctrain.errors import ExitCode, UserError
from hpctrain.report.drawing import INSTALL, can_draw
from hpctrain.run.events import RunStarted
from hpctrain.system import foreign_text
from hpctrain.system.cgroups import threads_per_rank, usable_cores
from hpctrain.system.files import write_atomically
from hpctrain.system.quantities import positive

STEPS, ROUNDS = 60, 2
THRESHOLD = 0.7
LARGE_BYTES = 2**20
WORTH_IT = 1.2
"""Speedup of the ring over Allreduce above which it is mentioned."""
FACTOR = 16
"""Predictions extend to this multiple of the largest measured size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--ranks", default="1,2", help="comma-separated numbers of ranks (default: 1,2)")
    parser.add_argument(
        "--mode",
        choices=("weak", "strong", "both"),
        default="both",
        help="weak: the batch of each rank stays the same; strong: the global batch does (default: both)",
    )
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"steps of a run (default: {STEPS})")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"runs of each size (default: {ROUNDS})")
    parser.add_argument("--slurm", action="store_true", help="each run is a Slurm job, on nodes as launch: fills them")
    parser.add_argument(
        "--link",
        metavar="GBIT,US",
        help="bandwidth and latency between nodes to assume if no size spans two: Gbit/s, microseconds",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        help=f"least efficiency that is worth more nodes (default: {THRESHOLD})",
    )
    parser.add_argument("--output", help="folder of runs, scaling.json and scaling.svg (default: runs/<name>-scaling)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    config = load(args.run_file, args.overrides)
    if not config.task:
        raise UserError("launch.command names a plain command, whose steps cannot be timed", "name a task")
    ranks, assumed = parse_ranks(args.ranks), parse_link(args.link)
    if args.steps < runs.LEAST_STEPS or args.rounds < 1 or not 0 < args.threshold < 1:
        fix = f"give --steps {runs.LEAST_STEPS} or more, --rounds 1 or more, --threshold between 0 and 1"
        raise UserError("--steps, --rounds or --threshold is out of range", fix)
    if not args.slurm:
        runs.require_one_machine()
    modes: list[Mode] = ["weak", "strong"] if args.mode == "both" else [args.mode]
    cores = None if args.slurm else usable_cores()
    threads = None if cores is None else config.train.threads or threads_per_rank(cores, ranks[-1])
    output = Path(args.output or f"runs/{config.name}-scaling").absolute()
    shapes = runs.shapes(config, ranks, args.slurm)
    jobs = runs.jobs(config, modes, shapes, args.steps, args.rounds, threads, output)
    runs.write(jobs, output)
    (runs.run_on_slurm if args.slurm else runs.run_here)(jobs)

    timings, samples = runs.timings(jobs), runs.samples(jobs)
    batches = {mode: runs.batches(config, mode, ranks) for mode in modes}
    by_mode = {mode: _of_mode(timings, shapes, batches[mode]) for mode in modes}
    crowded = [shape for shape in shapes if cores is not None and shape.ranks * (threads or 1) > cores]
    result = {
        "run": config.name,
        "threshold": args.threshold,
        "parallel": dataclasses.asdict(config.parallel),
        "threads": threads or config.train.threads or config.launch.slurm.cpus_per_rank or 1,
        **analyse(by_mode, samples, runs.started(jobs), crowded, assumed, cores, args.threshold),
    }
    picture = output / "scaling.svg"
    result["plot"] = str(picture) if can_draw() else None
    write_atomically(output / "scaling.json", json.dumps(result, indent=1).encode())  # first: it may have taken hours
    if can_draw():
        write_atomically(picture, report.draw(result).encode())
    last = picture if can_draw() else f"no picture, which needs matplotlib: {INSTALL}"
    foreign_text.show(json.dumps(result) if args.json else f"{report.text(result)}\n{last}")
    return ExitCode.DONE


def analyse(
    by_mode: dict[Mode, list[Timing]],
    samples: Sequence[Sample],
    started: RunStarted,
    crowded: Sequence[Shape],
    assumed: RingLink | None,
    cores: int | None,
    threshold: float,
) -> dict[str, Any]:
    """Computes all results from the measurements; pure.

    Args:
        by_mode: runs by mode and size.
        samples: measured exchanges.
        started: the ``run_started`` event of the largest run.
        crowded: shapes with more threads than cores.
        assumed: link between nodes, if none was measured.
        cores: cores of this machine; None for Slurm jobs.
        threshold: least acceptable efficiency.
    """
    gradients = StepGradients(started.gradient_bytes or 0, started.reducer != "horovod")
    ring = started.reducer_variant == "mpi-ring"
    fair = [
        sample for sample in samples if sample.shape not in crowded and (sample.ring == ring or sample.shape.nodes == 1)
    ]
    shapes = [timing.shape for timing in next(iter(by_mode.values())) if timing.shape not in crowded]
    largest = shapes[-1] if shapes else None
    slower = None if ring else allreduce_over_ring(samples)
    nodes_known = assumed is not None or any(sample.shape.nodes > 1 for sample in fair)
    larger = runs.further(largest, nodes_known, cores, FACTOR) if largest else []
    return {
        "cores": cores,
        "framework": started.framework,
        "reducer": started.reducer_variant,
        "gradient_bytes": gradients.bytes,
        "exchange": report.exchange_result(fair, assumed),
        "modes": {
            mode: report.mode_result(mode, timings, crowded, fair, gradients, larger, assumed, threshold)
            for mode, timings in by_mode.items()
        },
        "allreduce_over_ring": slower,
        "warnings": warnings(crowded, cores, gradients.through_mpi, nodes_known, slower),
    }


def allreduce_over_ring(samples: Sequence[Sample]) -> float | None:
    """Ratio of MPI's Allreduce to our ring in time: median over multi-node shapes and large buffers, or None."""
    times: dict[tuple[Shape, int], tuple[list[float], list[float]]] = {}
    for sample in samples:
        if sample.shape.nodes > 1 and sample.bytes >= LARGE_BYTES:
            times.setdefault((sample.shape, sample.bytes), ([], []))[sample.ring].append(sample.seconds)
    ratios = [np.median(allreduce) / np.median(ring) for allreduce, ring in times.values() if allreduce and ring]
    return float(np.median(ratios)) if ratios else None


def warnings(
    crowded: Sequence[Shape], cores: int | None, through_mpi: bool, nodes_known: bool, slower: float | None
) -> list[str]:
    """Caveats of the results."""
    found = []
    if crowded:
        sizes = ", ".join(str(shape.ranks) for shape in crowded)
        found.append(
            f"{sizes} ranks have more threads than this machine's {cores} cores: efficiency there says nothing about a "
            "larger machine, and fits leave them out"
        )
    if not through_mpi:
        found.append(
            "the runs used Horovod, but the exchange model is for MPI: if the runs were faster, as with NCCL, the "
            "model is scaled to them"
        )
    if slower is not None and slower > WORTH_IT:
        found.append(
            f"between nodes MPI's Allreduce takes {slower:.1f} times as long as our ring, and its algorithm changes "
            "with the number of nodes: reduce.kind: auto chooses between them"
        )
    if not nodes_known:
        found.append(
            "no size spans two nodes: several cannot be predicted; measure with --slurm, or assume a link with --link"
        )
    return found


def parse_ranks(words: str) -> list[int]:
    """Parses '1,2,4', in ascending order. Raises UserError."""
    try:
        ranks = sorted({int(word) for word in words.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise UserError(f"--ranks {words}", "give numbers with commas, such as 1,2,4")
    return ranks


def parse_link(words: str | None) -> RingLink | None:
    """Parses '100,2' as Gbit/s and microseconds. Raises UserError."""
    if words is None:
        return None
    try:
        gbit, microseconds = map(float, words.split(","))
    except ValueError:
        gbit = microseconds = 0.0
    if not (0 < gbit < math.inf and 0 <= microseconds < math.inf):
        raise UserError(f"--link {words}", "give Gbit/s and microseconds, such as 100,2")
    return RingLink(microseconds * 1e-6, 8e-9 / gbit)


def _of_mode(timings: Sequence[Timing], shapes: Sequence[Shape], batches: Sequence[int]) -> list[Timing]:
    found = {(timing.shape, timing.global_batch): timing for timing in timings}
    return [found[pair] for pair in zip(shapes, batches, strict=True)]
