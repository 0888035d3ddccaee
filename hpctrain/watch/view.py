"""Everything that ``hpctrain watch`` shows of a run at one moment. Pure; what is not known is None or empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm.directives import seconds
from hpctrain.run import standing
from hpctrain.run.job import QueueEntry
from hpctrain.run.progress import Digest, Warned, finding
from hpctrain.run.standing import Life, State, Word
from hpctrain.system.json_shape import is_count, typed

live_view_of = typed(
    {
        **dict.fromkeys(("attempt", "step", "num_ranks", "dropped_windows"), (is_count, None)),
        "ranks": [{"rank": is_count, "host": str, "busy_s": float, "wait_s": float, "excess": float}],
        "verdicts": ([str], None),
    }
)
"""The content of monitor/live.json; None for a value that cannot be that."""


@dataclass(frozen=True)
class Found:
    """What was read of a run."""

    path: Path
    config: Mapping[str, Any]
    """run.yaml."""
    info: Mapping[str, Any]
    """run.json."""
    digest: Digest
    live: Mapping[str, Any]
    """The monitor's last window, monitor/live.json."""
    life: Life | None = None
    job: QueueEntry | None = None
    job_age_s: float = 0.0
    """Seconds since Slurm was asked."""
    left_out: str = ""
    """What was left out of the events, for people."""


@dataclass(frozen=True)
class Line:
    """A value that was measured again and again."""

    name: str
    value: float | None
    """The last one; None for NaN."""
    step: int
    history: tuple[float, ...]
    """Means over equal stretches of the run."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest one."""

    step: int
    age_s: float | None
    bytes: int | None
    write_s: float | None
    stall_s: float | None


@dataclass(frozen=True)
class Rank:
    """A rank in the monitor's last window: medians of its steps."""

    rank: int
    host: str
    busy_s: float
    wait_s: float
    excess: float
    """Busy time above the median of the other ranks, 0.2 for 20%."""


@dataclass(frozen=True)
class View:
    """A run at one moment; times in seconds."""

    run: str
    folder: str
    time: float
    """Unix seconds."""
    state: State
    attempt: int | None
    requeues: int
    """Attempts that Slurm began by itself."""
    num_ranks: int | None
    num_hosts: int | None
    framework: str | None
    reducer: str | None
    job: str | None
    step: int | None
    total_steps: int | None
    epoch: int | None
    epochs: int | None
    steps_per_s: float | None
    samples_per_s: float | None
    end_in_s: float | None
    """Until the last step at the measured rate."""
    limit_in_s: float | None
    """Until the job's time limit."""
    silent_s: float | None
    """Since the last event."""
    lines: tuple[Line, ...] = ()
    """Loss, validation metrics, learning rate."""
    checkpoint: Checkpoint | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by phase, mean over the newest interval and the ranks; the longest first."""
    ranks: tuple[Rank, ...] = ()
    """By rank; of very many, those that the monitor found busiest."""
    ranks_step: int | None = None
    """End of the window that the ranks were measured in."""
    verdicts: tuple[str, ...] = ()
    warnings: tuple[Warned, ...] = ()
    """The newest last."""
    left_out: str = ""
    """Events that were left out, being none of the run's own."""
    is_behind: bool = False
    """Events are still being read."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        made = asdict(self)
        made["state"], made["why"], made["is_over"] = self.state.word.value, self.state.why, self.state.is_over
        return made


def make(found: Found, now: float, is_behind: bool = False) -> View:
    """The view of what was read, at a time (Unix seconds)."""
    digest, train = found.digest, found.digest.newest.get("train", {})
    attempts = [entry for entry in found.info.get("attempts") or [] if isinstance(entry, Mapping)]
    newest = attempts[-1] if attempts else {}
    is_command = bool((found.config.get("launch") or {}).get("command"))
    stands = standing.of_run(attempts, digest, found.life, found.job, now, has_events=not is_command)
    runs = stands.word is Word.RUNNING
    started = digest.newest.get("run_started", {})
    attempt = newest.get("attempt") or digest.attempt or found.live.get("attempt")
    has_live = bool(found.live) and found.live.get("attempt") == attempt
    hosts = started.get("hosts") or newest.get("hosts")
    age = max(0.0, now - train["time"]) if train else 0.0
    return View(
        run=str(found.config.get("name") or found.path.name),
        folder=str(found.path),
        time=now,
        state=stands,
        attempt=attempt,
        requeues=sum(1 for entry in attempts if entry.get("restarts")),
        num_ranks=newest.get("ranks") or started.get("ranks") or found.live.get("num_ranks"),
        num_hosts=len(set(hosts)) if hosts else newest.get("nodes"),
        framework=started.get("framework"),
        reducer=started.get("reducer"),
        job=found.job.id if found.job else newest.get("job_id"),
        step=digest.step,
        total_steps=digest.total_steps,
        epoch=train.get("epoch"),
        epochs=(found.config.get("train") or {}).get("epochs"),
        steps_per_s=digest.steps_per_s,
        samples_per_s=train.get("samples_per_s"),
        end_in_s=_end_in(digest, age) if runs and digest.attempt == attempt else None,
        limit_in_s=_limit_in(found.job, found.job_age_s) if runs else None,
        silent_s=max(0.0, now - digest.last_time) if digest.last_time is not None else None,
        lines=tuple(_lines(digest)),
        checkpoint=_checkpoint(digest, attempts, now),
        phases_s=_phases(train),
        ranks=tuple(_ranks(found.live)) if has_live else (),
        ranks_step=found.live.get("step") if has_live else None,
        verdicts=tuple(_verdicts(digest, found.live if has_live and runs else {})),
        warnings=tuple(_warnings(digest, attempts)),
        left_out=found.left_out,
        is_behind=is_behind,
    )


def _end_in(digest: Digest, age_s: float) -> float | None:
    if digest.step is None or not digest.total_steps or not digest.steps_per_s:
        return None
    return max(0.0, (digest.total_steps - digest.step) / digest.steps_per_s - age_s)


def _limit_in(job: QueueEntry | None, age_s: float) -> float | None:
    """Slurm's time left; None where it says none (no limit, invalid)."""
    try:
        left = seconds(job.left) if job is not None else None
    except UserError:
        return None
    return max(0.0, left - age_s) if left is not None else None


def _lines(digest: Digest) -> list[Line]:
    train, evaluated = digest.newest.get("train", {}), digest.newest.get("eval", {})
    values = {"loss": (train.get("loss"), train.get("step", 0))} if train else {}
    for name, value in (evaluated.get("metrics") or {}).items():
        values[f"validation {name}"] = value, evaluated["step"]
    if "lr" in train:
        values["lr"] = train["lr"], train["step"]
    return [
        Line(name, value if isinstance(value, (int, float)) else None, step, _history(digest, name))
        for name, (value, step) in values.items()
    ]


def _history(digest: Digest, name: str) -> tuple[float, ...]:
    return tuple(digest.curves[name].means()) if name in digest.curves else ()


def _checkpoint(digest: Digest, attempts: Sequence[Mapping[str, Any]], now: float) -> Checkpoint | None:
    """By the events; where they are lost, what run.json says of the attempts' ends."""
    saved = digest.newest.get("checkpoint_saved")
    if saved:
        age = max(0.0, now - saved["time"])
        return Checkpoint(saved["step"], age, saved.get("bytes"), saved.get("write_s"), saved.get("stall_s"))
    steps = [entry.get(key) for entry in attempts for key in ("from_step", "to_step")]
    known = [step for step in steps if step is not None]
    return Checkpoint(max(known), None, None, None, None) if known else None


def _phases(train: Mapping[str, Any]) -> dict[str, float]:
    steps = max(int(train.get("steps") or 1), 1)
    spent = {name: value / steps for name, value in (train.get("seconds") or {}).items() if value}
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def _ranks(live: Mapping[str, Any]) -> list[Rank]:
    fields = ("rank", "host", "busy_s", "wait_s", "excess")
    whole = [entry for entry in live.get("ranks") or [] if all(name in entry for name in fields)]
    return sorted((Rank(*(entry[name] for name in fields)) for entry in whole), key=lambda rank: rank.rank)


def _verdicts(digest: Digest, live: Mapping[str, Any]) -> list[str]:
    """The monitor's own words of the moment, suspicions included; without them, what it confirmed last."""
    hang = [str(digest.hang.get("sentence") or "no rank moves")] if digest.hang else []
    found = live["verdicts"] if live.get("verdicts") is not None else map(finding, digest.findings.values())
    dropped = live.get("dropped_windows")
    behind = [f"{dropped} windows were dropped: the monitor's agents do not keep up"] if dropped else []
    return [*hang, *map(str, found), *behind]


def _warnings(digest: Digest, attempts: Sequence[Mapping[str, Any]]) -> list[Warned]:
    """Of events, and how attempts failed; by time."""
    warned = list(digest.warnings)
    for entry in attempts[-4:]:
        verdict = entry.get("verdict") or {}
        if verdict.get("exit_code") not in (None, 0, 75):
            text = f"{verdict.get('reason')}" + (f" ({verdict['fix']})" if verdict.get("fix") else "")
            warned.append(Warned(float(entry.get("ended") or 0), int(entry["attempt"]), entry.get("to_step"), text))
    return sorted(warned, key=lambda each: each.time)
