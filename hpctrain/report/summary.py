"""The numbers of a run that fit into a table. Pure functions of what was read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.run.history import RunData, Series
from hpctrain.run.progress import outcome

USEFUL = ("data", "to_device", "forward", "backward", "exchange", "optimizer")
"""Phases that advance the weights; callbacks and checkpoints do not."""


@dataclass(frozen=True)
class Attempt:
    """One attempt on the time line."""

    number: int
    begin: float
    """Unix seconds."""
    end: float
    """Unix seconds; of a live attempt the newest event's time."""
    from_step: int
    to_step: int
    ending: str
    """The verdict's reason, ``running``, or ``unknown``."""
    orderly: bool
    """Ended as planned or on request, or not yet."""


def summarize(data: RunData) -> dict[str, Any]:
    """Everything ``report --json`` gives; None where the run folder does not tell."""
    started, finished = data.last("run_started"), data.last("run_finished")
    attempts = make_attempts(data)
    return {
        "name": data.config.get("name") or data.path.name,
        "folder": str(data.path),
        "id": data.info.get("id"),
        "state": state(data),
        "steps": last_step(data),
        "ranks": started.get("ranks"),
        "hosts": started.get("hosts"),
        "framework": started.get("framework"),
        "reducer": started.get("reducer"),
        "versions": started.get("versions"),
        "git_commit": (data.info.get("attempts") or [{}])[-1].get("git_commit"),
        "final_loss": final(data.train.get("loss")),
        "metrics": {name: extremes(series) for name, series in sorted(data.metrics.items())},
        "samples_per_s_median": median(data.train.get("samples_per_s")),
        "phase_share": phase_share(data),
        "goodput": goodput(data, attempts),
        "rank_hours": rank_hours(data, attempts),
        "seconds": sum(attempt.end - attempt.begin for attempt in attempts) or finished.get("seconds"),
        "attempts": [vars(attempt) for attempt in attempts],
        "checkpoints": checkpoints(data),
        "stragglers": [without_common(event) for event in data.rare.get("straggler", [])],
        "hangs": [without_common(event) for event in data.rare.get("hang", [])],
        "events": data.counts,
    }


def state(data: RunData) -> str:
    """See run_dir.outcome."""
    return outcome(data.info.get("attempts") or [], data.last("run_started"), data.last("run_finished"))


def last_step(data: RunData) -> int:
    """The newest step that any event tells."""
    steps = [series.step[-1] for series in (*data.train.values(), *data.metrics.values()) if len(series.step)]
    return int(max([*steps, *(event["step"] for events in data.rare.values() for event in events)], default=0))


def last_time(data: RunData, before: float = math.inf) -> float:
    """Time of the newest event, or of the newest before a time; Unix seconds."""
    curves = [series.time for series in (*data.train.values(), *data.metrics.values())]
    found = [times[np.searchsorted(times, before) - 1] for times in curves if len(times) and times[0] < before]
    told = [event["time"] for events in data.rare.values() for event in events if event["time"] < before]
    return float(max([*found, *told], default=0.0))


def make_attempts(data: RunData) -> list[Attempt]:
    """Attempts from run.json, else from the events."""
    newest = last_time(data)
    made = []
    entries = data.info.get("attempts") or []
    for entry, later in zip(entries, [*entries[1:], {}], strict=False):
        verdict = entry.get("verdict") or {}
        lives = entry.get("ended") is None and not later  # one without an end that another one follows was killed
        ending = verdict.get("reason") or verdict.get("action") or ("running" if lives else "unknown")
        begin = float(entry.get("started") or 0.0)
        end = float(entry.get("ended") or max(last_time(data, later.get("started") or math.inf), begin))
        first, last = entry.get("from_step") or 0, entry.get("to_step") or later.get("from_step") or 0
        orderly = verdict.get("exit_code", 0 if lives else None) in (0, 75)
        made.append(Attempt(int(entry["attempt"]), begin, end, first, last, ending, orderly))
    if made:
        return made
    for started in data.rare.get("run_started", []):
        number = started["attempt"]
        finished = [event for event in data.rare.get("run_finished", []) if event["attempt"] == number]
        end = finished[-1]["time"] if finished else newest
        ending = str(finished[-1].get("reason")) if finished else "unknown"
        last = finished[-1]["step"] if finished else last_step(data)
        made.append(Attempt(number, started["time"], end, started["step"], last, ending, bool(finished)))
    return made


def phase_share(data: RunData) -> dict[str, float] | None:
    """Each phase's share of the measured time, over the run."""
    totals = {name: float(series.value.sum()) for name, series in data.phases.items()}
    whole = sum(totals.values())
    return {name: total / whole for name, total in totals.items()} if whole > 0 else None


def goodput(data: RunData, attempts: list[Attempt]) -> float | None:
    """Time in steps that count, each once, over the time in which ranks were allocated."""
    allocated = sum(attempt.end - attempt.begin for attempt in attempts)
    useful = sum(float(series.value.sum()) for name, series in data.phases.items() if name in USEFUL)
    return min(useful / allocated, 1.0) if allocated > 0 and useful > 0 else None


def rank_hours(data: RunData, attempts: list[Attempt]) -> float | None:
    """Ranks times hours, over all attempts."""
    ranks = {event["attempt"]: event.get("ranks") for event in data.rare.get("run_started", [])}
    ranks |= {int(entry["attempt"]): entry["ranks"] for entry in data.info.get("attempts") or [] if entry.get("ranks")}
    if not attempts or any(not ranks.get(attempt.number) for attempt in attempts):
        return None
    return sum((attempt.end - attempt.begin) / 3600 * float(ranks[attempt.number] or 0) for attempt in attempts)


def checkpoints(data: RunData) -> dict[str, Any]:
    """How many, how large, what they cost."""
    saved = data.rare.get("checkpoint_saved", [])

    def middle(key: str) -> float | None:
        values = [event[key] for event in saved if isinstance(event.get(key), (int, float))]
        return float(np.median(values)) if values else None

    size, write = middle("bytes"), middle("write_s")
    return {
        "saved": data.counts.get("checkpoint_saved", 0),
        "failed": data.counts.get("checkpoint_failed", 0),
        "bytes_median": size,
        "stall_s_median": middle("stall_s"),
        "write_s_median": write,
        "bytes_per_s_median": size / write if size and write else None,
    }


def extremes(series: Series) -> dict[str, float]:
    """Last, smallest and largest value."""
    finite = series.value[np.isfinite(series.value)]
    if not finite.size:
        return {}
    return {"last": float(series.value[-1]), "min": float(finite.min()), "max": float(finite.max())}


def final(series: Series | None) -> float | None:
    """The last value."""
    return float(series.value[-1]) if series is not None and len(series.value) else None


def median(series: Series | None) -> float | None:
    """The median value."""
    return float(np.median(series.value)) if series is not None and len(series.value) else None


def without_common(event: dict[str, Any]) -> dict[str, Any]:
    """An event without its name."""
    return {key: value for key, value in event.items() if key != "event"}
