"""``python -m benchmarks.straggler.batch_times FILE...``: the monitor's rule on batch times of other people's jobs.

Reads files of Alibaba's cluster trace (github.com/alibaba/clusterdata, cluster-trace-gpu-v2020/mini-batch-time/data,
``job_N_norm.csv``): a row for each worker and every tenth unit of time, with the normalised duration of its mini-batch.
A unit counts as a step here, since the files do not say how many steps it is. Pass files of a clone: nothing is
fetched.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

from benchmarks.program import start
from benchmarks.straggler.traces import Trace
from benchmarks.straggler.trials import ACCUSING, WINDOW
from hpctrain.errors import ExitCode, UserError
from hpctrain.monitor.chief.finding import FindingState
from hpctrain.monitor.chief.judge import Judge
from hpctrain.monitor.window import CAUSES
from hpctrain.system import foreign_text
from hpctrain.train.clock import Phase


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="job_N_norm.csv of a clone of clusterdata")


def read_trace(path: Path) -> Trace:
    """Reads a job; a row stands for the steps up to the next one. The file does not say which part of a step is slow.

    Raises:
        UserError: not such a file.
    """
    columns = ("worker", "time", "batch_time_norm")
    try:
        with path.open(newline="") as file:
            rows = [[int(row[name]) for name in columns] for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError):
        rows = []
    if not rows:
        raise UserError(f"{path} has no {', '.join(columns)}", "pass job_N_norm.csv of a clone of clusterdata")
    worker, step, spent_each = np.asarray(rows).T
    steps, column = np.unique(step, return_inverse=True)
    times = np.zeros((worker.max() + 1, len(steps)))
    times[worker, column] = spent_each
    times = np.repeat(times[:, :-1], np.diff(steps), axis=1)
    spent = np.zeros((*times.shape, len(CAUSES)))
    spent[:, :, Phase.FORWARD] = times
    return Trace(spent, np.ones(times.shape), 0.01 * float(np.median(times)))


def named(trace: Trace) -> list[str]:
    """Describes what the monitor says of workers, in order: when it names one, and when it takes that back."""
    judge = Judge([f"n{rank}" for rank in range(trace.ranks)])
    said: list[str] = []
    confirmed: set[int] = set()
    for window in trace.windows(WINDOW):
        end = (window.index + 1) * WINDOW
        for finding in judge.judge(window):
            if finding.kind not in ACCUSING:
                continue
            workers = ", ".join(map(str, finding.ranks))
            if finding.state is FindingState.CONFIRMED:
                confirmed.update(finding.ranks)
                said.append(f"worker {workers} {finding.slowdown:.0%} slower (step {end})")
            elif finding.state is FindingState.CLEARED and confirmed & {*finding.ranks}:
                said.append(f"worker {workers} no longer (step {end})")
    return said


def run(args: argparse.Namespace) -> int:
    """Judges each job."""
    for path in args.files:
        trace = read_trace(path)
        said = "; ".join(named(trace)) or "no worker named"
        foreign_text.show(f"{path.name}: {trace.ranks} workers, {trace.steps} steps: {said}")
    return ExitCode.DONE


if __name__ == "__main__":
    about = "what the monitor says of published mini-batch times of other people's jobs"
    sys.exit(start("straggler.batch_times", about, add_arguments, run))
