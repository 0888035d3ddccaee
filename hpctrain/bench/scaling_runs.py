"""Runs of ``hpctrain bench scaling``: makes a run file for each size from the user's.

Starts them on this machine or as Slurm jobs, and reads their results.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpctrain.config.loading import dump
from hpctrain.config.sections import CheckpointConfig, Config, EarlyStopConfig, TrackConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines.slurm.directives import ranks_per_node
from hpctrain.launch.engines.slurm.job import current
from hpctrain.run.events import RunFinished, RunStarted, Train
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import Outcome
from hpctrain.run.run_view import RunView
from hpctrain.system import foreign_text, python
from hpctrain.system.array_types import Floats
from hpctrain.system.files import write_atomically

INTERVALS = 12
"""Reported intervals of a run; the first WARM_UP are discarded, and the last, which includes the evaluation."""
WARM_UP = 2
LEAST_STEPS = INTERVALS
Mode = Literal["weak", "strong"]
PARTS = ("compute", "exchange", "data", "rest")
COMPUTE, EXCHANGE, DATA, REST = range(4)


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """Numbers of nodes and of ranks per node."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} ({self.ranks} rank{'s' * (self.ranks > 1)})"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Steps of the training runs of one shape."""

    shape: Shape
    global_batch: int
    parts: Floats
    """float64[intervals, 4]: mean seconds per step of each of PARTS, by interval."""

    @property
    def typical(self) -> Floats:
        """float64[4]: seconds of each part, mean over the intervals between the quartiles of the step time.

        Unlike medians, these parts add up to the step.
        """
        steps = self.parts.sum(axis=1)
        low, high = np.percentile(steps, (25, 75))
        return np.asarray(self.parts[(steps >= low) & (steps <= high)].mean(axis=0))

    @property
    def step_s(self) -> float:
        """Typical seconds of a step."""
        return float(self.typical.sum())


@dataclasses.dataclass(frozen=True)
class ScalingJob:
    """One run."""

    name: str
    """Name of its run file and run folder."""
    shape: Shape
    config: Config
    global_batch: int


def shapes(config: Config, ranks: Sequence[int], slurm: bool) -> list[Shape]:
    """Shapes for these numbers of ranks: on this machine, or on full nodes according to the run file.

    Raises:
        UserError: a number of ranks does not fill its nodes.
    """
    if not slurm:
        return [Shape(1, count) for count in ranks]
    full = ranks_per_node(config.launch)
    for count in ranks:
        if count > full and count % full:
            fix = f"give multiples of {full}, or fewer than {full}, to --ranks"
            raise UserError(f"{count} ranks do not fill nodes of {full} ranks (launch.ranks_per_node)", fix)
    return [Shape(-(-count // full), min(count, full)) for count in ranks]


def batches(config: Config, mode: Mode, ranks: Sequence[int]) -> list[int]:
    """Global batch for each number of ranks; at the smallest, both modes use the run file's.

    Raises:
        UserError: the batch does not divide, or is smaller than the number of ranks.
    """
    least = min(ranks)
    whole = config.train.global_batch or (config.train.batch_per_rank or 1) * least
    if mode == "weak":
        if whole % least:
            fix = "set train.batch_per_rank, or --mode strong"
            raise UserError(f"train.global_batch is {whole}, which {least} ranks cannot share equally", fix)
        return [whole // least * count for count in ranks]
    if whole < max(ranks):
        fix = "set train.global_batch higher, give fewer --ranks, or --mode weak"
        raise UserError(f"a global batch of {whole} leaves some of {max(ranks)} ranks without a sample", fix)
    return [whole for _ in ranks]


def jobs(
    config: Config,
    modes: Sequence[Mode],
    shapes: Sequence[Shape],
    steps: int,
    rounds: int,
    threads: int | None,
    output: Path,
) -> list[ScalingJob]:
    """Makes all runs, in order of execution. A size shared by two modes is run once.

    Args:
        config: the user's run.
        modes: weak, strong or both.
        shapes: shapes by size.
        steps: steps of a training run.
        rounds: runs of each size.
        threads: threads per rank at every size, since otherwise more ranks would get fewer threads each; None uses the
            run file's.
        output: folder for all run folders.
    """
    ranks = [shape.ranks for shape in shapes]
    wanted = dict.fromkeys(
        pair for mode in modes for pair in zip(shapes, batches(config, mode, ranks), strict=True)
    )  # in order, each once
    made = []
    for number in range(1, rounds + 1):
        for shape, batch in wanted:
            name = f"ranks-{shape.ranks}-batch-{batch}-round-{number}"
            made.append(ScalingJob(name, shape, _training(config, name, shape, batch, steps, threads, output), batch))
    return made


def _training(
    config: Config, name: str, shape: Shape, batch: int, steps: int, threads: int | None, output: Path
) -> Config:
    """The user's run, shortened and without anything outside the step."""
    train = dataclasses.replace(
        config.train,
        epochs=None,
        steps=steps,
        global_batch=batch,
        batch_per_rank=None,
        eval_every_epochs=None,
        eval_every_steps=steps,
        early_stop=EarlyStopConfig(),
        threads=config.train.threads or threads,
    )
    return dataclasses.replace(
        config,
        name=_safe(f"{config.name}-{name}"),
        run_dir=str(output / name),
        train=train,
        checkpoint=CheckpointConfig(enabled=False),
        track=TrackConfig(every_steps=max(1, steps // INTERVALS)),
        launch=dataclasses.replace(config.launch, nodes=shape.nodes, ranks_per_node=shape.ranks_per_node),
    )


def _safe(name: str) -> str:
    """Shortens a run's name to the allowed 100 characters."""
    return name[-100:].lstrip("._-")


PART_OF = {"data": DATA, "exchange": EXCHANGE, "callbacks": REST, "checkpoint": REST}
"""Part by phase; all other phases count as compute."""


def write(jobs: Sequence[ScalingJob], output: Path) -> None:
    """Writes a run file for each job.

    Raises:
        UserError: the folder holds run files of another measurement.
    """
    output.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        file, text = run_file(job), dump(job.config)
        if file.exists() and file.read_text(encoding="utf-8") != text:
            fix = "name another folder with --output, or remove this one"
            raise UserError(f"{output} holds measurements of another run file, or with other options", fix)
        write_atomically(file, text.encode())


def require_one_machine() -> None:
    """Raises UserError in a Slurm job of several nodes, of which ``run_here`` would use one."""
    job = current()
    if job is not None and job.nodes > 1:
        raise UserError(
            f"without --slurm all sizes run on this machine, and job {job.id} has {job.nodelist}",
            "give --slurm on a login node: each size is a job; or env -u SLURM_JOB_ID hpctrain bench scaling ...",
        )


def run_here(jobs: Sequence[ScalingJob]) -> None:
    """Runs jobs on this machine one after another, like ``hpctrain run -n N``; completed ones are skipped.

    Raises:
        RunFailed: a run failed.
    """
    for number, job in enumerate(jobs, 1):
        if not is_done(job):
            foreign_text.show(f"{number} of {len(jobs)}: {job.name}", sys.stderr)
            _run(job, ["run", "-n", str(job.shape.ranks), str(run_file(job))])


def run_on_slurm(jobs: Sequence[ScalingJob]) -> None:
    """Submits all jobs that are not done, and waits for them.

    Raises:
        RunFailed: some failed; the first is named.
    """
    todo = [job for job in jobs if not is_done(job)]
    foreign_text.show(f"submitting {len(todo)} jobs, and waiting for them", sys.stderr)
    with ThreadPoolExecutor(max(1, len(todo))) as pool:
        list(pool.map(lambda job: _run(job, ["submit", "--wait", str(run_file(job))]), todo))


def run_file(job: ScalingJob) -> Path:
    """Path of the job's run file, next to its run folder."""
    assert job.config.run_dir is not None, "every job has its folder"
    return Path(job.config.run_dir).with_suffix(".yaml")


def is_done(job: ScalingJob) -> bool:
    """Whether the job's run folder holds its result."""
    run = RunDir.of(job.config.name, job.config.run_dir)
    finished = RunView(run.path).look().progress.newest(RunFinished)
    return finished is not None and finished.reason == Outcome.COMPLETED


def timings(jobs: Sequence[ScalingJob]) -> dict[tuple[Shape, int], Timing]:
    """Steps of the runs, by shape and batch, with the intervals of all rounds."""
    found: dict[tuple[Shape, int], list[Any]] = {}
    for job in jobs:
        found.setdefault((job.shape, job.global_batch), []).append(intervals(view(job)))
    return {key: Timing(*key, np.concatenate(rounds)) for key, rounds in found.items()}


def view(job: ScalingJob) -> RunView:
    """The job's run."""
    return RunView(RunDir.of(job.config.name, job.config.run_dir).path)


def intervals(run: RunView) -> Any:
    """float64[intervals, 4]: seconds per step by PARTS, without warm-up and evaluation intervals."""
    rows = []
    for event in run.events():
        if isinstance(event, Train):
            row = np.zeros(len(PARTS))
            for phase, seconds in event.seconds_per_step().items():
                row[PART_OF.get(phase, COMPUTE)] += seconds
            rows.append(row)
    return np.array(rows[WARM_UP:-1])


def started(jobs: Sequence[ScalingJob]) -> RunStarted:
    """The ``run_started`` event of the training run with the most ranks."""
    last = max(jobs, key=lambda job: job.shape.ranks)
    return next(event for event in view(last).events() if isinstance(event, RunStarted))


def _run(job: ScalingJob, words: Sequence[str]) -> None:
    done = subprocess.run(python.module("hpctrain", *words), capture_output=True, text=True, check=False)
    if not is_done(job):
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        fix = f"hpctrain explain {job.config.run_dir} says why; the same command then resumes with what is missing"
        raise RunFailed(f"{job.name} ended with exit code {done.returncode} and without a result:\n{said}", fix)
