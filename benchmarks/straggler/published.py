"""``python -m benchmarks.straggler.published FOLDER``: the monitor's rule on traces of other people's jobs.

Reads the ``data`` folder of ByteDance's artifact of "Understanding Stragglers in Large Model Training Using What-if
Analysis" (github.com/ByteDance-Seed/StragglerAnalysis, Apache 2.0): for each job NAME, ``meta-NAME.yaml`` (sizes),
``trace-NAME.parquet`` (a row per operation: dp_rank, stage, step, optype, duration in seconds), ``result-NAME.json``
(slowdown by DP rank and by stage if only its operations keep their time) and ``mw-NAME.json`` (share of the slowdown
that few workers explain). Pass a clone's folder; nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.program import start
from benchmarks.straggler.traces import Trace
from benchmarks.straggler.trials import ACCUSING
from hpctrain.errors import ExitCode, UserError
from hpctrain.monitor.chief.finding import FindingState, Kind
from hpctrain.monitor.chief.judge import Judge
from hpctrain.monitor.window import CAUSES
from hpctrain.run.grid import Grid
from hpctrain.system import foreign_text
from hpctrain.train.clock import Phase

PHASES = {
    "forward-compute": Phase.FORWARD,
    "backward-compute": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
    "optimizer-clip-main-grad": Phase.OPTIMIZER,
}
"""A worker's own time, by operation; all others exchange, and wait for other workers."""
BLAMED = 0.1
"""Slowdown from which a worker counts as blamed: our choice, as the analysis publishes the slowdown itself."""
BY_WORKERS = 0.5
"""Share of a job's slowdown from which it counts as due to few workers: likewise."""


@dataclass(frozen=True)
class Job:
    """A published job with its labels."""

    name: str
    grid: Grid
    trace: Trace
    """Ranks are workers, numbered as in ``grid``; the tensor index is not part of the data."""
    slow: frozenset[int]
    """Workers that the published analysis blames."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder data of a clone of StragglerAnalysis")
    parser.add_argument(
        "--steps", type=int, default=8, help="steps in a window (default: 8; the jobs have some 40 steps)"
    )


def read_job(folder: Path, name: str) -> Job:
    """Reads a job.

    Raises:
        UserError: a file or column is missing.
    """
    from pyarrow import parquet

    def text(path: str) -> str:
        if not (folder / path).is_file():
            raise UserError(f"{folder} has no {path}", "pass the folder data of a clone of StragglerAnalysis")
        return (folder / path).read_text()

    meta = yaml.safe_load(text(f"meta-{name}.yaml"))
    grid = Grid(meta["dp_size"] * meta["pp_size"], pipeline=meta["pp_size"])
    columns = ["dp_rank", "stage", "step", "optype", "duration"]
    found = parquet.read_schema(folder / f"trace-{name}.parquet").names
    if missing := set(columns) - set(found):
        raise UserError(f"trace-{name}.parquet has no column {min(missing)}", "pass an unchanged trace")
    rows = parquet.read_table(folder / f"trace-{name}.parquet", columns=columns).to_pydict()
    shares = text(f"mw-{name}.json")
    return Job(
        name, grid, trace_of(grid, rows), blamed(grid, json.loads(text(f"result-{name}.json")), json.loads(shares))
    )


def trace_of(grid: Grid, rows: dict[str, list[Any]]) -> Trace:
    """Sums each worker's own time by step and phase; steps are put in order, without the gaps between them."""
    steps = np.unique(rows["step"])
    worker: NDArray[np.int64] = np.asarray(rows["stage"]) * grid.data + np.asarray(rows["dp_rank"])
    phase = np.asarray([PHASES.get(each, -1) for each in rows["optype"]])
    own = phase >= 0
    spent = np.zeros((grid.ranks, len(steps), len(CAUSES)))
    at = (worker[own], np.searchsorted(steps, rows["step"])[own], phase[own])
    np.add.at(spent, at, np.asarray(rows["duration"], np.float64)[own])
    return Trace(spent, np.ones(spent.shape[:2]), 0.01 * float(np.median(spent.sum(axis=2))))


def blamed(grid: Grid, result: dict[str, Any], shares: dict[str, Any]) -> frozenset[int]:
    """Returns workers of a slow DP rank and of a slow stage, if the analysis finds that few explain the slowdown."""
    if shares["Mw"] < BY_WORKERS:
        return frozenset()
    by_data, by_stage = (result[f"blocking_decompose_by_{name}"] for name in ("dp_rank", "stage"))
    places = {rank: grid.place(rank) for rank in range(grid.ranks)}
    return frozenset(
        rank
        for rank, place in places.items()
        if min(by_data[str(place.data)], by_stage[str(place.stage)]) >= 1 + BLAMED
    )


def judged(job: Job, steps: int) -> tuple[frozenset[int], list[Kind]]:
    """Returns the workers that the monitor names, and the kinds of its other findings."""
    judge = Judge([f"n{rank}" for rank in range(job.grid.ranks)], grid=job.grid)
    findings = [finding for window in job.trace.windows(steps) for finding in judge.judge(window)]
    confirmed = [finding for finding in findings if finding.state is FindingState.CONFIRMED]
    named = frozenset(rank for finding in confirmed if finding.kind in ACCUSING for rank in finding.ranks)
    return named, sorted({finding.kind for finding in confirmed if finding.kind not in ACCUSING})


def run(args: argparse.Namespace) -> int:
    """Judges each job; prints workers named and blamed, precision and recall."""
    names = sorted(path.stem.removeprefix("trace-") for path in args.folder.glob("trace-*.parquet"))
    if not names:
        raise UserError(f"{args.folder} has no trace-*.parquet", "pass the folder data of a clone of StragglerAnalysis")
    right = told = wanted = 0
    for name in names:
        job = read_job(args.folder, name)
        named, others = judged(job, args.steps)
        right, told, wanted = right + len(named & job.slow), told + len(named), wanted + len(job.slow)
        foreign_text.show(
            f"{name}: {job.trace.ranks} workers, {job.trace.steps} steps; named {listed(job, named)}; "
            f"blamed by the analysis: {listed(job, job.slow)}; other findings: {', '.join(others) or 'none'}"
        )
    for measure, of in (("precision", told), ("recall", wanted)):
        foreign_text.show(f"{measure} {right} of {of}")
    return ExitCode.DONE


def listed(job: Job, workers: frozenset[int]) -> str:
    """Describes workers."""
    return ", ".join(f"{rank}{job.grid.label(rank)}" for rank in sorted(workers)) or "none"


if __name__ == "__main__":
    about = "compares the monitor's verdicts with a published analysis of other people's jobs"
    sys.exit(start("straggler.published", about, add_arguments, run))
