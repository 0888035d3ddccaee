"""``hpctrain bench scaling``: measures a run at several sizes and recommends how many ranks are worth using."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.bench import scaling_report as report
from hpctrain.bench import scaling_runs as runs
from hpctrain.config.loading import add_run_file, load
from hpctrain.errors import ExitCode, UserError
from hpctrain.report.drawing import INSTALL, can_draw, picture
from hpctrain.system import foreign_text
from hpctrain.system.cgroups import threads_per_rank, usable_cores
from hpctrain.system.files import write_atomically
from hpctrain.system.quantities import positive

STEPS, ROUNDS = 60, 2
THRESHOLD = 0.7


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
    ranks = parse_ranks(args.ranks)
    if args.steps < runs.LEAST_STEPS or args.rounds < 1 or not 0 < args.threshold < 1:
        fix = f"give --steps {runs.LEAST_STEPS} or more, --rounds 1 or more, --threshold between 0 and 1"
        raise UserError("--steps, --rounds or --threshold is out of range", fix)
    if not args.slurm:
        runs.require_one_machine()
    modes: list[runs.Mode] = ["weak", "strong"] if args.mode == "both" else [args.mode]
    cores = None if args.slurm else usable_cores()
    threads = None if cores is None else config.train.threads or threads_per_rank(cores, ranks[-1])
    output = Path(args.output or f"runs/{config.name}-scaling").absolute()
    shapes = runs.shapes(config, ranks, args.slurm)
    jobs = runs.jobs(config, modes, shapes, args.steps, args.rounds, threads, output)
    runs.write(jobs, output)
    (runs.run_on_slurm if args.slurm else runs.run_here)(jobs)

    timings, started = runs.timings(jobs), runs.started(jobs)
    crowded = [shape for shape in shapes if cores is not None and shape.ranks * (threads or 1) > cores]
    result: dict[str, Any] = {
        "run": config.name,
        "threshold": args.threshold,
        "parallel": dataclasses.asdict(config.parallel),
        "threads": threads or config.train.threads or config.launch.slurm.cpus_per_rank or 1,
        "cores": cores,
        "framework": started.framework,
        "reducer": started.reducer_variant,
        "gradient_bytes": started.gradient_bytes or 0,
        "modes": {},
        "warnings": warnings(crowded, cores),
    }
    for mode in modes:
        places = zip(shapes, runs.batches(config, mode, ranks), strict=True)
        result["modes"][mode] = report.mode_result(mode, [timings[each] for each in places], crowded, args.threshold)
    plot = output / "scaling.svg"
    result["plot"] = str(plot) if can_draw() else None
    write_atomically(output / "scaling.json", json.dumps(result, indent=1).encode())  # first: it may have taken hours
    if can_draw():
        write_atomically(plot, picture(report.charts(result)).encode())
    last = plot if can_draw() else f"no picture, which needs matplotlib: {INSTALL}"
    foreign_text.show(json.dumps(result) if args.json else f"{report.text(result)}\n{last}")
    return ExitCode.DONE


def parse_ranks(words: str) -> list[int]:
    """Parses '1,2,4', in ascending order. Raises UserError."""
    try:
        ranks = sorted({int(word) for word in words.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise UserError(f"--ranks {words}", "give numbers with commas, such as 1,2,4")
    return ranks


def warnings(crowded: Sequence[runs.Shape], cores: int | None) -> list[str]:
    """Caveats of the results."""
    if not crowded:
        return []
    sizes = ", ".join(str(shape.ranks) for shape in crowded)
    return [
        f"{sizes} ranks have more threads than this machine's {cores} cores: efficiency there says nothing about a "
        "larger machine"
    ]
