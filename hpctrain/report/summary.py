"""Computes a run's summary numbers. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.run import events
from hpctrain.run.attempts import Attempt
from hpctrain.run.history import RunHistory, Series
from hpctrain.run.run_status import ORDERLY


@dataclass(frozen=True)
class Span:
    """One attempt on the time line."""

    number: int
    begin: float
    """Unix seconds."""
    end: float
    """Unix seconds; the newest event's time for a live attempt."""
    from_step: int
    to_step: int
    ending: str
    """The verdict's reason, ``running``, or ``unknown``."""
    orderly: bool
    """Whether it ended as planned or on request, or has not ended."""


def summarize(data: RunHistory) -> dict[str, Any]:
    """Everything that ``report --json`` prints; None for what is unknown."""
    started = data.last(events.RunStarted)
    finished = data.last(events.RunFinished)
    spans = make_spans(data)
    start = started.to_json() if started else {}
    devices = next((event.ranks for event in reversed(data.all(events.Devices)) if event.ranks), ())
    run = data.run
    return {
        "name": run.name,
        "folder": str(run.path),
        "id": run.id,
        "state": run.outcome.value,
        "steps": last_step(data),
        **{name: start.get(name) for name in ("ranks", "hosts", "framework", "reducer", "versions")},
        "plan": (run.newest.plan if run.newest else "") or None,
        "git_commit": run.newest.git_commit if run.newest else None,
        "final_loss": final(data.train.get("loss")),
        "final_learning_rate": final(data.train.get("learning_rate")),
        "metrics": {name: extremes(series) for name, series in sorted(data.metrics.items())},
        "samples_per_s_median": median(data.train.get("samples_per_s")),
        "tokens_per_s_median": median(data.train.get("tokens_per_s")),
        "mfu_median": median(data.train.get("mfu")),
        "mfu_of_measured_peak": of_measured(median(data.train.get("mfu")), started),
        "flops_per_sample": start.get("flops_per_sample"),
        "phase_share": phase_share(data),
        "kwh": kwh(data),
        "devices": [{**vars(one), "slowed": ", ".join(one.slowed)} for one in devices],
        "goodput": run.account.goodput,
        "account": vars(run.account),
        "rank_hours": rank_hours(data, spans),
        "seconds": sum(span.end - span.begin for span in spans) or (finished.seconds if finished else None),
        "attempts": [vars(span) for span in spans],
        "checkpoints": checkpoints(data),
        "recoveries": [without_name(event) for event in data.all(events.Recovered)],
        "stragglers": [without_name(event) for event in data.all(events.Straggler)],
        "hangs": [without_name(event) for event in data.all(events.Hang)],
        "events": data.counts,
    }


def of_measured(mfu: float | None, started: events.RunStarted | None) -> float | None:
    """Utilisation of the measured peak, given that of the data sheet's; None if there is no data sheet."""
    if mfu is None or not (started and started.sheet_flops_per_s and started.peak_flops_per_s):
        return None
    return mfu * started.sheet_flops_per_s / started.peak_flops_per_s


def kwh(data: RunHistory) -> float | None:
    """Energy of all attempts' GPUs and, where it can be read, processors; None if nothing is known."""
    newest = {event.attempt: event for event in data.all(events.Devices)}
    joules = [part for event in newest.values() for part in (event.cpu_joules, event.gpu_joules) if part is not None]
    return sum(joules) / 3.6e6 if joules else None


def last_step(data: RunHistory) -> int:
    """The last step of any event, ignoring steps that a later attempt repeated or discarded."""
    steps = [int(series.step[-1]) for series in data.curves if len(series.step)]
    newest = max((event.attempt for event in data.rare), default=0)
    steps += [event.step for event in data.rare if event.attempt == newest]
    return max(steps, default=0)


def last_time(data: RunHistory, before: float = math.inf) -> float:
    """Time of the newest event, optionally before a given time; Unix seconds."""
    found = [event.time for event in data.rare if event.time < before]
    for series in data.curves:
        earlier = int(np.searchsorted(series.time, before))
        if earlier:
            found.append(float(series.time[earlier - 1]))
    return max(found, default=0.0)


def make_spans(data: RunHistory) -> list[Span]:
    """Attempts from run.json, or else from the events."""
    attempts = data.run.attempts
    if not attempts:
        return [_span_of_events(data, started) for started in data.all(events.RunStarted)]
    return [_span(data, attempt, later) for attempt, later in zip(attempts, [*attempts[1:], None], strict=True)]


def _span(data: RunHistory, attempt: Attempt, later: Attempt | None) -> Span:
    begin, verdict = attempt.started or 0.0, attempt.verdict
    before = later.started if later and later.started else math.inf
    lives = attempt.ended is None and later is None  # without an end but followed by another, it was killed
    ending = "running" if lives else "unknown"
    if verdict:
        ending = verdict.reason or verdict.action
    return Span(
        number=attempt.number,
        begin=begin,
        end=attempt.ended or max(last_time(data, before), begin),
        from_step=attempt.from_step or 0,
        to_step=attempt.to_step or (later.from_step if later else 0) or 0,
        ending=ending,
        orderly=verdict.exit_code in ORDERLY if verdict else lives,
    )


def _span_of_events(data: RunHistory, started: events.RunStarted) -> Span:
    number = started.attempt
    finished = next((event for event in reversed(data.all(events.RunFinished)) if event.attempt == number), None)
    if finished is None:
        return Span(number, started.time, last_time(data), started.step, last_step(data), "unknown", orderly=False)
    return Span(number, started.time, finished.time, started.step, finished.step, str(finished.reason), orderly=True)


def phase_share(data: RunHistory) -> dict[str, float] | None:
    """Each phase's share of the measured time, over the run."""
    totals = {name: float(series.value.sum()) for name, series in data.phases.items()}
    whole = sum(totals.values())
    return {name: total / whole for name, total in totals.items()} if whole > 0 else None


def rank_hours(data: RunHistory, spans: list[Span]) -> float | None:
    """Ranks times hours, over all attempts."""
    ranks = {event.attempt: event.ranks for event in data.all(events.RunStarted)}
    ranks |= {attempt.number: attempt.ranks for attempt in data.run.attempts if attempt.ranks}
    if not spans or any(not ranks.get(span.number) for span in spans):
        return None
    return sum((span.end - span.begin) / 3600 * float(ranks[span.number] or 0) for span in spans)


def checkpoints(data: RunHistory) -> dict[str, Any]:
    """Number, size and cost of checkpoints."""
    saved = data.all(events.CheckpointSaved)

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.median(known)) if known else None

    size = middle(event.bytes for event in saved)
    write = middle(event.write_s for event in saved)
    return {
        "saved": data.counts.get(events.CheckpointSaved.NAME, 0),
        "failed": data.counts.get(events.CheckpointFailed.NAME, 0),
        "bytes_median": size,
        "stall_s_median": middle(event.stall_s for event in saved),
        "write_s_median": write,
        "bytes_per_s_median": size / write if size and write else None,
    }


def extremes(series: Series) -> dict[str, float]:
    """Last value, and smallest and largest finite values; empty if none is finite."""
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


def without_name(event: events.Event) -> dict[str, Any]:
    """An event's fields except its name."""
    return {key: value for key, value in event.to_json().items() if key != "event"}
