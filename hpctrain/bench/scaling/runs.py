"""The runs of ``hpctrain bench scaling``: a run file for each size, made from the user's.

They are started here, or as Slurm jobs, and what they left is read.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.bench.scaling.model import COMPUTE, DATA, EXCHANGE, PARTS, REST, Mode, Sample, Shape, Timing
from hpctrain.config.loading import dump
from hpctrain.config.sections import CheckpointConfig, Config, EarlyStopConfig, LaunchConfig, TrackConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines.slurm.directives import ranks_per_node
from hpctrain.run.events import RunFinished, RunStarted, Train
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import Outcome
from hpctrain.run.view import RunView
from hpctrain.system import foreign_text, python
from hpctrain.system.files import write_atomically

INTERVALS = 12
"""Reported intervals of a run; the first ones warm up and the last holds the evaluation."""
WARM_UP = 2
LEAST_STEPS = INTERVALS
EXCHANGE_FILE = "exchange.json"
"""In the run folder of an exchange job."""


@dataclasses.dataclass(frozen=True)
class ScalingJob:
    """One run."""

    name: str
    """Of its run file and run folder."""
    shape: Shape
    config: Config
    global_batch: int | None
    """None: this run measures exchanges."""


def shapes(config: Config, ranks: Sequence[int], slurm: bool) -> list[Shape]:
    """Where these numbers of ranks run: on this machine, or on nodes that the run file fills.

    Raises:
        UserError: a number of ranks that does not fill its nodes.
    """
    if not slurm:
        return [Shape(1, count) for count in ranks]
    full = ranks_per_node(config.launch)
    for count in ranks:
        if count > full and count % full:
            raise UserError(
                f"{count} ranks do not fill nodes of {full} ranks (launch.ranks_per_node)",
                f"give multiples of {full}, or fewer than {full}, to --ranks",
            )
    return [Shape(-(-count // full), min(count, full)) for count in ranks]


def batches(config: Config, mode: Mode, ranks: Sequence[int]) -> list[int]:
    """Global batch for each number of ranks; at the smallest both modes have the run file's.

    Raises:
        UserError: the batch does not divide, or is smaller than the number of ranks.
    """
    least = min(ranks)
    whole = config.train.global_batch or (config.train.batch_per_rank or 1) * least
    if mode == "weak":
        if whole % least:
            raise UserError(
                f"train.global_batch is {whole}, which {least} ranks cannot share equally",
                "set train.batch_per_rank, or --mode strong",
            )
        return [whole // least * count for count in ranks]
    if whole < max(ranks):
        raise UserError(
            f"a global batch of {whole} leaves some of {max(ranks)} ranks without a sample",
            "set train.global_batch higher, give fewer --ranks, or --mode weak",
        )
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
    """All runs, in the order in which they take turns. A size that two modes share is run once.

    Args:
        config: the user's run.
        modes: weak, strong or both.
        shapes: by size.
        steps: of a training run.
        rounds: runs of each kind.
        threads: of each rank at every size, else more ranks would mean fewer threads each; None: as the run file says.
        output: folder of all run folders.
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
        for shape in shapes:
            if shape.ranks > 1:
                name = f"exchange-{shape.ranks}-round-{number}"
                made.append(ScalingJob(name, shape, _exchanging(config, name, shape, output), None))
    return made


def further(measured: Shape, nodes_known: bool, cores: int | None, factor: int) -> list[Shape]:
    """Larger shapes, up to a multiple of the ranks measured: more nodes as full as those, if a link between nodes is
    known; else more ranks of this node, as long as it has cores."""
    found = []
    size = measured
    while size.ranks * 2 <= measured.ranks * factor:
        size = Shape(size.nodes * 2, size.ranks_per_node) if nodes_known else Shape(1, size.ranks * 2)
        if not nodes_known and (cores is None or size.ranks > cores):
            break
        found.append(size)
    return found


def _training(
    config: Config, name: str, shape: Shape, batch: int, steps: int, threads: int | None, output: Path
) -> Config:
    """The user's run, shortened, without anything outside the step."""
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
        launch=_placed(config, shape),
    )


def _exchanging(config: Config, name: str, shape: Shape, output: Path) -> Config:
    """A plain command instead of training."""
    out = output / name / EXCHANGE_FILE
    own = "python3" if config.launch.slurm.wrap else None  # an image brings its own
    command = python.module("hpctrain.bench.scaling.exchange", "--out", str(out), interpreter=own)
    launch = dataclasses.replace(_placed(config, shape), command=tuple(command))
    return dataclasses.replace(
        config, name=_safe(f"{config.name}-{name}"), run_dir=str(output / name), task="", launch=launch
    )


def _placed(config: Config, shape: Shape) -> LaunchConfig:
    return dataclasses.replace(config.launch, nodes=shape.nodes, ranks_per_node=shape.ranks_per_node)


def _safe(name: str) -> str:
    """A run's name has at most 100 characters."""
    return name[-100:].lstrip("._-")


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
    """Next to the run folder."""
    assert job.config.run_dir is not None, "every job has its folder"
    return Path(job.config.run_dir).with_suffix(".yaml")


def is_done(job: ScalingJob) -> bool:
    """Whether the job's run folder holds its result."""
    run = RunDir.of(job.config.name, job.config.run_dir)
    if job.global_batch is None:
        return (run.path / EXCHANGE_FILE).exists()
    finished = RunView(run.path).look().progress.newest(RunFinished)
    return finished is not None and finished.reason == Outcome.COMPLETED


def timings(jobs: Sequence[ScalingJob]) -> list[Timing]:
    """Steps of the training runs, by shape and batch, with the intervals of all rounds."""
    found: dict[tuple[Shape, int], list[Any]] = {}
    for job in jobs:
        if job.global_batch is not None:
            found.setdefault((job.shape, job.global_batch), []).append(intervals(view(job)))
    return [Timing(shape, batch, np.concatenate(rounds)) for (shape, batch), rounds in found.items()]


def view(job: ScalingJob) -> RunView:
    """The job's run."""
    return RunView(RunDir.of(job.config.name, job.config.run_dir).path)


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
            rows = json.loads((RunDir.of(job.config.name, job.config.run_dir).path / EXCHANGE_FILE).read_text())["rows"]
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
