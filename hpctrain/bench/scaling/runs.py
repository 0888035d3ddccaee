"""Starts the runs of ``hpctrain bench scaling``, here or as Slurm jobs, and reads what they left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.bench.scaling.fit import Sample, Shape
from hpctrain.bench.scaling.model import COMPUTE, DATA, EXCHANGE, PARTS, REST, Timing
from hpctrain.bench.scaling.plan import EXCHANGE_FILE, WARM_UP, ScalingJob
from hpctrain.config.loading import dump
from hpctrain.errors import RunFailed, UserError
from hpctrain.run import Outcome, RunView
from hpctrain.run.events import RunFinished, RunStarted, Train
from hpctrain.run.folder import RunDir
from hpctrain.system import foreign_text, python
from hpctrain.system.files import write_atomically

PART_OF = {"data": DATA, "exchange": EXCHANGE, "callbacks": REST, "checkpoint": REST}
"""Parts by phase; every other phase computes."""


def write(jobs: Sequence[ScalingJob], output: Path) -> None:
    """Writes a run file for each job.

    Raises:
        UserError: the folder holds those of another measurement.
    """
    output.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        file, text = run_file(job), dump(job.config)
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise UserError(
                f"{output} holds measurements of another run file, or with other options",
                "name another folder with --output, or remove this one",
            )
        write_atomically(file, text.encode())


def run_here(jobs: Sequence[ScalingJob]) -> None:
    """Runs on this machine one after the other, as ``hpctrain run -n N`` does. What is done already is not repeated.

    Raises:
        RunFailed: one of them failed.
    """
    for number, job in enumerate(jobs, 1):
        if not is_done(job):
            foreign_text.show(f"{number} of {len(jobs)}: {job.name}", sys.stderr)
            _run(job, ["run", "-n", str(job.shape.ranks), str(run_file(job))])


def run_on_slurm(jobs: Sequence[ScalingJob]) -> None:
    """Submits what is not done yet, all at once, and returns when all have ended.

    Raises:
        RunFailed: some failed; the first is named.
    """
    todo = [job for job in jobs if not is_done(job)]
    foreign_text.show(f"submitting {len(todo)} jobs, and waiting for them", sys.stderr)
    with ThreadPoolExecutor(max(1, len(todo))) as pool:
        ended = [pool.submit(_run, job, ["submit", "--wait", str(run_file(job))]) for job in todo]
    for future in ended:
        future.result()


def run_file(job: ScalingJob) -> Path:
    """Beside the run folder."""
    assert job.config.run_dir is not None, "every job has its folder"
    return Path(job.config.run_dir).with_suffix(".yaml")


def is_done(job: ScalingJob) -> bool:
    """Whether the job's run folder holds its result."""
    run = RunDir.for_config(job.config)
    if job.global_batch is None:
        return (run.path / EXCHANGE_FILE).exists()
    finished = RunView(run.path).look().progress.newest(RunFinished)
    return finished is not None and finished.reason == Outcome.COMPLETED


def timings(jobs: Sequence[ScalingJob]) -> list[Timing]:
    """Steps of the training runs, by shape and batch: the intervals of all rounds together."""
    found: dict[tuple[Shape, int], list[Any]] = {}
    for job in jobs:
        if job.global_batch is not None:
            found.setdefault((job.shape, job.global_batch), []).append(intervals(view(job)))
    return [Timing(shape, batch, np.concatenate(rounds)) for (shape, batch), rounds in found.items()]


def view(job: ScalingJob) -> RunView:
    """The job's run."""
    return RunView(RunDir.for_config(job.config).path)


def intervals(run: RunView) -> Any:
    """float64[intervals, 4]: seconds of a step by PARTS, without those that warm up and the one that evaluates."""
    rows = []
    for event in run.events():
        if isinstance(event, Train):
            row = np.zeros(len(PARTS))
            for phase, seconds in event.seconds_per_step().items():
                row[PART_OF.get(phase, COMPUTE)] += seconds
            rows.append(row)
    return np.array(rows[WARM_UP:-1])


def samples(jobs: Sequence[ScalingJob]) -> list[Sample]:
    """Measured exchanges."""
    found = []
    for job in jobs:
        if job.global_batch is None:
            rows = json.loads((RunDir.for_config(job.config).path / EXCHANGE_FILE).read_text())["rows"]
            found += [Sample(job.shape, row["bytes"], row["seconds"], row["ring"]) for row in rows]
    return found


def started(jobs: Sequence[ScalingJob]) -> RunStarted:
    """The beginning of the training run with the most ranks."""
    last = max((job for job in jobs if job.global_batch is not None), key=lambda job: job.shape.ranks)
    return next(event for event in view(last).events() if isinstance(event, RunStarted))


def _run(job: ScalingJob, words: Sequence[str]) -> None:
    done = subprocess.run(python.module("hpctrain", *words), capture_output=True, text=True, check=False)
    if not is_done(job):
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise RunFailed(
            f"{job.name} ended with exit code {done.returncode} and without a result:\n{said}",
            f"hpctrain explain {job.config.run_dir} says why; the same command then resumes with what is missing",
        )
