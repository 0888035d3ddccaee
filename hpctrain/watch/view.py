"""The data that ``hpctrain watch`` shows of a run at one time. Pure; unknown values are None or empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm.directives import limit_seconds
from hpctrain.run.attempts import Attempt
from hpctrain.run.events import CheckpointSaved, Eval, RankDevice, Recovered, RunStarted, Train
from hpctrain.run.progress import Progress, Warned
from hpctrain.run.run_status import ORDERLY, LiveRank, LiveWindow, QueueEntry, RunSnapshot, RunState, Word
from hpctrain.run.time_account import TimeAccount
from hpctrain.system.json_shape import is_number


@dataclass(frozen=True)
class Measured:
    """A value measured repeatedly."""

    name: str
    value: float | None
    """The last value; None for NaN."""
    step: int
    history: tuple[float, ...]
    """Means over equal stretches of the run."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint."""

    step: int
    age_s: float | None
    bytes: int | None
    write_s: float | None
    stall_s: float | None


@dataclass(frozen=True)
class View:
    """A run at one time; durations in seconds."""

    run: str
    folder: str
    time: float
    """Unix seconds."""
    state: RunState
    attempt: int | None
    requeues: int
    """Number of attempts started by a Slurm requeue."""
    num_ranks: int | None
    num_hosts: int | None
    plan: str
    """How the model is partitioned over ranks; empty if each rank holds all of it."""
    framework: str | None
    reducer: str | None
    job: str | None
    step: int | None
    total_steps: int | None
    epoch: int | None
    epochs: int | None
    steps_per_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    """Model FLOPs utilisation, 0.4 for 40%."""
    end_in_s: float | None
    """Time until the last step at the measured rate."""
    limit_in_s: float | None
    """Time until the job's time limit."""
    silent_s: float | None
    """Time since the last event."""
    lines: tuple[Measured, ...] = ()
    """Loss, training and validation metrics, learning rate."""
    checkpoint: Checkpoint | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step by phase, mean over the newest interval and the ranks; longest first."""
    ranks: tuple[LiveRank, ...] = ()
    """Ranks in order; if there are very many, those that the monitor found busiest."""
    devices: tuple[RankDevice, ...] = ()
    """GPUs of these ranks."""
    ranks_step: int | None = None
    """Last step of the window in which the ranks were measured."""
    account: TimeAccount | None = None
    """Account of the run's time so far."""
    recoveries: tuple[Recovered, ...] = ()
    """Recoveries from failures, newest last."""
    verdicts: tuple[str, ...] = ()
    warnings: tuple[Warned, ...] = ()
    """Warnings, newest last."""
    left_out: str = ""
    """Describes events that were ignored because a field has the wrong type; empty if there were none."""
    is_behind: bool = False
    """Whether events are still being read."""

    def plain(self) -> dict[str, Any]:
        """The view as a dict for JSON."""
        made = asdict(self)
        made["recoveries"] = [event.to_json() for event in self.recoveries]
        made["state"] = self.state.word.value
        made["why"] = self.state.why
        made["is_over"] = self.state.is_over
        return made


def make(found: RunSnapshot, now: float, job: QueueEntry | None = None, job_age_s: float = 0.0) -> View:
    """Makes a view at a time (Unix seconds), with the job as reported by Slurm ``job_age_s`` seconds ago."""
    progress, newest = found.progress, found.newest or Attempt()
    train = progress.newest(Train) or Train(step=0)
    started = progress.newest(RunStarted) or RunStarted(step=0)
    stands = found.state(now, job)
    runs = stands.word is Word.RUNNING
    window = found.live or LiveWindow()
    attempt = newest.number or progress.attempt or window.attempt
    live = window if window.attempt == attempt else LiveWindow()
    hosts = started.hosts or newest.hosts
    left_s = progress.left_s if runs and progress.attempt == attempt else None
    return View(
        run=found.name,
        folder=str(found.path),
        time=now,
        state=stands,
        attempt=attempt,
        requeues=sum(1 for each in found.attempts if each.restarts),
        num_ranks=newest.ranks or started.ranks or window.num_ranks,
        num_hosts=len(set(hosts)) or newest.nodes,
        plan=newest.plan,
        framework=started.framework,
        reducer=started.reducer,
        job=(job.id if job else None) or newest.job_id,
        step=progress.step,
        total_steps=progress.total_steps,
        epoch=train.epoch,
        epochs=(found.config.get("train") or {}).get("epochs"),
        steps_per_s=progress.steps_per_s,
        samples_per_s=train.samples_per_s,
        tokens_per_s=train.tokens_per_s,
        mfu=train.mfu,
        end_in_s=max(0.0, left_s - max(0.0, now - train.time)) if left_s is not None else None,
        limit_in_s=_limit_in(job, job_age_s) if runs else None,
        silent_s=max(0.0, now - progress.last_time) if progress.last_time is not None else None,
        lines=tuple(_lines(progress)),
        checkpoint=_checkpoint(progress, found.attempts, now),
        phases_s=_phases(train),
        ranks=live.ranks,
        devices=live.devices,
        ranks_step=live.step,
        account=found.account,
        recoveries=tuple(progress.sums.recoveries),
        verdicts=tuple(_verdicts(progress, live if runs else LiveWindow())),
        warnings=tuple(_warnings(progress, found.attempts)),
        left_out=found.left_out,
        is_behind=found.is_behind,
    )


def _limit_in(job: QueueEntry | None, age_s: float) -> float | None:
    """Time left according to Slurm; None without a limit or if invalid."""
    try:
        left = limit_seconds(job.left) if job is not None else None
    except UserError:
        return None
    return max(0.0, left - age_s) if left is not None else None


def _lines(progress: Progress) -> list[Measured]:
    train, evaluated = progress.newest(Train), progress.newest(Eval)
    values: dict[str, tuple[float | None, int]] = {"loss": (train.loss, train.step)} if train else {}
    if train:
        metrics = {name: value for name, value in train.more.items() if is_number(value)}
        values |= {f"training {name}": (value, train.step) for name, value in metrics.items()}
    if evaluated:
        values |= {f"validation {name}": (value, evaluated.step) for name, value in evaluated.metrics.items()}
    if train and train.learning_rate is not None:
        values["learning rate"] = train.learning_rate, train.step
    elif train and train.lr is not None:
        values["lr"] = train.lr, train.step
    curves = progress.curves
    return [
        Measured(name, value, step, tuple(curves[name].means()) if name in curves else ())
        for name, (value, step) in values.items()
    ]


def _checkpoint(progress: Progress, attempts: Sequence[Attempt], now: float) -> Checkpoint | None:
    """The newest checkpoint, from the events or, if they are lost, from the attempts' records."""
    saved = progress.newest(CheckpointSaved)
    if saved:
        return Checkpoint(saved.step, max(0.0, now - saved.time), saved.bytes, saved.write_s, saved.stall_s)
    steps = [step for attempt in attempts for step in (attempt.from_step, attempt.to_step) if step is not None]
    return Checkpoint(max(steps), None, None, None, None) if steps else None


def _phases(train: Train) -> dict[str, float]:
    spent = {name: seconds for name, seconds in train.seconds_per_step().items() if seconds}
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def _verdicts(progress: Progress, live: LiveWindow) -> list[str]:
    """The monitor's current findings, including suspicions; without a live view, those last confirmed."""
    hang = [progress.hang.text] if progress.hang else []
    found = live.verdicts if live.verdicts is not None else [event.text for event in progress.findings.values()]
    dropped = live.dropped_windows
    behind = [f"{dropped} windows were dropped: the monitor's agents do not keep up"] if dropped else []
    return [*hang, *found, *behind]


def _warnings(progress: Progress, attempts: Sequence[Attempt]) -> list[Warned]:
    """Warnings from events, and failures among the last four attempts, by time."""
    warned = list(progress.warnings)
    for attempt in attempts[-4:]:
        verdict = attempt.verdict
        if verdict and verdict.exit_code not in ORDERLY:
            text = verdict.reason + (f" ({verdict.fix})" if verdict.fix else "")
            warned.append(Warned(attempt.ended or 0.0, attempt.number, attempt.to_step, text))
    return sorted(warned, key=lambda each: each.time)
