"""What ended a run, or what slows it: one paragraph from the evidence in its folder.

Rules are tried in order; the first that finds its evidence speaks. Where none does, the answer is ``unknown``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.report.summary import phase_share, state
from hpctrain.run.history import RunData

DATA_BOUND = 0.2
"""Share of the time that waits for data beyond which a run is called data-bound."""
MEASURED_S = 10.0
"""Seconds of training below which shares say nothing."""
EXCHANGE_BOUND = 0.3
"""The same for the exchange of gradients."""
COSTLY = 0.05
"""Share of the run that a straggler must cost to be named."""


@dataclass(frozen=True)
class Explanation:
    """The answer."""

    cause: str
    """One word for scripts: completed, nan, out_of_memory, killed, node, hang, disk_full, singletons, user_error,
    exception, damaged_checkpoint, unreadable_checkpoint, horovod, in_use, no_progress, stopped, time_limit, vanished,
    straggler, data_bound, exchange_bound, running, unknown."""
    title: str
    """What happened, in one sentence."""
    evidence: tuple[str, ...] = ()
    """What the run folder holds that says so."""
    advice: str = ""
    """What to do next."""
    findings: tuple[str, ...] = field(default=())
    """Further things worth knowing, such as a slow rank in a completed run."""

    @property
    def text(self) -> str:
        """Evidence, advice and findings as running text."""
        parts = [*self.evidence, *([self.advice] if self.advice else []), *self.findings]
        return " ".join(_capital(part) + ("" if part.endswith((".", "!", "?")) else ".") for part in parts if part)


def explain(data: RunData) -> Explanation:
    """The first rule that applies, with what slows the run as further findings."""
    found = next((answer for rule in RULES if (answer := rule(data)) is not None), unknown(data))
    slow = [finding for rule in SLOW for finding in rule(data)]
    if found.cause in ("completed", "running") and slow:
        first = slow[0]
        title = found.title.rstrip(".") + "; " + first.title[0].lower() + first.title[1:]
        cause = first.cause if found.cause == "running" else found.cause
        rest = tuple(finding.title for finding in slow[1:])
        return Explanation(cause, title, (*found.evidence, *first.evidence), first.advice or found.advice, rest)
    findings = tuple(finding.title for finding in slow)
    return Explanation(found.cause, found.title, found.evidence, found.advice, findings)


# What ended the run


@dataclass(frozen=True)
class Error:
    """How one attempt failed, as run.json and the last words tell."""

    attempt: int
    rank: int | None
    host: str | None
    what: str
    fix: str
    type: str
    cause: str

    @property
    def where(self) -> str:
        """Rank and host, as far as they are known."""
        if self.rank is None:
            return f"attempt {self.attempt}"
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}, attempt {self.attempt}"


def newest_error(data: RunData) -> Error | None:
    """The failure that ended the newest attempt; none where it ended well or has not ended."""
    attempts = data.info.get("attempts") or []
    if not attempts:
        return None
    number = int(attempts[-1]["attempt"])
    verdict = attempts[-1].get("verdict") or data.words.get(number, {}).get("verdict") or _own_verdict(data, number)
    if verdict.get("action") in (None, "done", "stop") or int(verdict.get("exit_code") or 0) in (0, 75):
        return None
    error: dict[str, Any] = next(
        (word["error"] for word in _failed_words(data, number) if word.get("rank") == verdict.get("rank")), {}
    )
    return Error(
        attempt=number,
        rank=verdict.get("rank"),
        host=verdict.get("host"),
        what=str(verdict.get("reason") or ""),
        fix=str(verdict.get("fix") or ""),
        type=str(error.get("type", "")),
        cause=str(verdict.get("cause") or ""),
    )


def _own_verdict(data: RunData, attempt: int) -> dict[str, Any]:
    """What the first failed rank said, where no supervisor lived to conclude anything from it."""
    for word in _failed_words(data, attempt):
        error = word["error"]
        found = {"action": "requeue", "exit_code": word.get("exit_code") or 70, "cause": "error"}
        return {
            **found,
            "reason": error["what"],
            "fix": error["fix"],
            "rank": word.get("rank"),
            "host": word.get("host"),
        }
    return {}


def _failed_words(data: RunData, attempt: int) -> list[dict[str, Any]]:
    words = [word for word in data.words.get(attempt, {}).get("ranks", []) if word.get("error")]
    return sorted(words, key=lambda word: float(word.get("ended") or 0))


PATTERNS: Sequence[tuple[str, str, str]] = (
    ("nan", r"is not finite", "The loss became NaN or infinite"),
    (
        "singletons",
        r"launcher started \d+ ranks but MPI sees|ranks do not find each other|believe to be alone",
        "The ranks did not find each other",
    ),
    ("disk_full", r"No space left|Disk quota|File too large", "A disk was full"),
    ("unreadable_checkpoint", r"cannot be read now", "A file system did not give a checkpoint"),
    ("damaged_checkpoint", r"checkpoints?\b.*(damaged|none is sound|checksum)", "No sound checkpoint was found"),
    ("horovod", r"Horovod (is not installed|and mpi4py)|horovod\.\w+ cannot be", "Horovod cannot be used"),
    ("out_of_memory", r"out of memory|OutOfMemory|MemoryError|Cannot allocate", "Memory ran out"),
    (
        "in_use",
        r"in use by another live run|been (replaced|taken over) by",
        "Another live run holds the run folder",
    ),
    ("read_only", r"Read-only file system", "A file system cannot be written"),
    ("preflight", r"^preflight: ", "The job's own checks before the start found a fault"),
)
"""Cause, what its error says, and the sentence for it; the first match counts."""


def by_message(data: RunData) -> Explanation | None:
    """An error whose text tells its cause."""
    error = newest_error(data)
    if error is None:
        return None
    for cause, pattern, title in PATTERNS:
        if re.search(pattern, error.what):
            return _of_error(cause, title, error)
    return None


def by_verdict(data: RunData) -> Explanation | None:
    """What the supervisor found out about ranks that could not speak."""
    error = newest_error(data)
    titles = {
        "out_of_memory": "The kernel ended a rank because memory ran out",
        "killed": "A rank was killed",
        "node": "A node failed",
        "hang": "The run hung",
        "vanished": "A rank ended without a word",
        "stop": "The ranks did not stop in time",
        "preflight": "The job could not begin",
    }
    if error is None or error.cause not in titles:
        return None
    hangs = [event for event in data.rare.get("hang", []) if event["attempt"] == error.attempt]
    evidence = [str(event["sentence"]) for event in hangs[-1:] if event.get("sentence")]
    return _of_error(error.cause, titles[error.cause], error, evidence)


def by_hang(data: RunData) -> Explanation | None:
    """The monitor reported a hang in an attempt that did not end well, or has not ended."""
    hang = data.last("hang")
    attempts = data.info.get("attempts") or [{}]
    if (
        not hang
        or state(data) not in ("failed", "running", "unknown")
        or hang["attempt"] != attempts[-1].get("attempt")
    ):
        return None
    if hang.get("state") == "cleared":
        return None
    said = str(hang.get("sentence") or f"no step completed after step {hang['step']}")
    return Explanation(
        "hang", "The run hangs", (said,), "look at the stacks in monitor/, then hpctrain stop or cancel it"
    )


def by_error(data: RunData) -> Explanation | None:
    """Any other error: the user's mistake, or an exception."""
    error = newest_error(data)
    if error is None:
        return None
    if error.type in ("UserError", "MissingExtra"):
        return _of_error("user_error", "The run file, its data or its environment is wrong", error)
    if "in a row failed" in error.what or "come no further" in error.what:
        return _of_error("no_progress", "Attempts came no further", error)
    if error.type:
        return _of_error("exception", f"A rank failed with {error.type}", error)
    return _of_error("unknown", "The run failed", error)


def by_stop(data: RunData) -> Explanation | None:
    """Stopped on request, by a person or by the time limit."""
    if state(data) not in ("stop_requested", "stop"):
        return None
    request = data.last("stop_requested")
    by = str(request.get("by") or "a request")
    timed = "USR1" in by or "time limit" in by
    where = f"{by} was seen at step {request['step']}" if request else f"{by} was seen"
    saved = data.last("checkpoint_saved")
    kept = f"the newest checkpoint is of step {saved['step']}" if saved else "no checkpoint was saved"
    title = "The time limit came near and the run stopped" if timed else "The run was asked to stop"
    return Explanation(
        "time_limit" if timed else "stopped", title, (where, kept), "the same command goes on from there"
    )


def by_completion(data: RunData) -> Explanation | None:
    """Ended as planned."""
    reached = state(data)
    if reached not in ("completed", "early_stop", "done"):
        return None
    finished = data.last("run_finished")
    step = finished.get("step", "the last")
    title = "The run ended early: its metric no longer improved" if reached == "early_stop" else "The run completed"
    attempts = len(data.info.get("attempts") or [1])
    evidence = f"it reached step {step} in {attempts} attempt{'s' if attempts > 1 else ''}"
    return Explanation("completed", title, (evidence,))


def by_life(data: RunData) -> Explanation | None:
    """Still going on."""
    if state(data) != "running" or not data.train:
        return None
    return Explanation("running", "The run goes on")


def unknown(data: RunData) -> Explanation:
    """No evidence."""
    missing = [
        name
        for name, there in (("events", data.counts), ("run.json", data.info), ("last words", data.words))
        if not there
    ]
    evidence = (
        f"the run folder has no {', no '.join(missing)}" if missing else "nothing in the run folder says how it ended"
    )
    return Explanation(
        "unknown", "It is unknown what ended this run", (evidence,), "look at the job's own log and at logs/"
    )


# What slows the run


def stragglers(data: RunData) -> list[Explanation]:
    """Confirmed slow ranks that cost something."""
    worst: dict[Any, dict[str, Any]] = {}
    for event in data.rare.get("straggler", []):
        key = (event.get("kind"), event.get("rank"), event.get("cause"))
        if event.get("state") == "confirmed" and (event.get("cost") or 0) >= COSTLY:
            worst[key] = max(worst.get(key, event), event, key=lambda each: each.get("cost") or 0)
    ordered = sorted(worst.values(), key=lambda event: -(event.get("cost") or 0))
    return [
        Explanation("straggler", _capital(str(event.get("sentence") or f"rank {event.get('rank')} is slow")), (), "")
        for event in ordered[:3]
        if event.get("rank") is not None or event.get("host")
    ]


def phases(data: RunData) -> list[Explanation]:
    """Time that does not compute."""
    share = phase_share(data) or {}
    if sum(float(series.value.sum()) for series in data.phases.values()) < MEASURED_S:
        return []
    found = []
    if share.get("data", 0) > DATA_BOUND:
        advice = "raise data.workers or data.prefetch_batches, or pack the data contiguously with hpctrain data pack"
        found.append(Explanation("data_bound", f"{share['data']:.0%} of the time waits for data", (), advice))
    if share.get("exchange", 0) > EXCHANGE_BOUND:
        advice = (
            "use a larger batch per rank, train.accumulate, or reduce.compression: fp16; hpctrain bench step measures"
        )
        title = f"{share['exchange']:.0%} of the time waits for the exchange of gradients"
        found.append(Explanation("exchange_bound", title, (), advice))
    return found


def failed_checkpoints(data: RunData) -> list[Explanation]:
    """Checkpoints that could not be written."""
    failed = data.last("checkpoint_failed")
    if not failed:
        return []
    count = data.counts.get("checkpoint_failed", 1)
    which = "1 checkpoint" if count == 1 else f"{count} checkpoints"
    title = f"{which} could not be written, the last at step {failed['step']}: {failed.get('error')}"
    saved, in_a_row = data.last("checkpoint_saved"), failed.get("failures") or 1
    evidence: tuple[str, ...] = ()
    if not saved or saved["time"] < failed["time"]:
        newest = f"the newest one is of step {saved['step']}" if saved else "there is none"
        times = f"the last {in_a_row} attempts to save failed" if in_a_row > 1 else "none has been saved since"
        evidence = (f"{times}, and {newest}: what was trained since is not saved",)
    return [Explanation("checkpoint_failed", title, evidence, "free space in the run folder")]


Rule = Callable[[RunData], Explanation | None]
RULES: tuple[Rule, ...] = (by_message, by_verdict, by_hang, by_error, by_stop, by_completion, by_life)
SLOW = (stragglers, failed_checkpoints, phases)


def _of_error(cause: str, title: str, error: Error, more: Sequence[str] = ()) -> Explanation:
    said = error.what if error.rank is None or f"rank {error.rank}" in error.what else f"{error.where}: {error.what}"
    return Explanation(cause, title, (said, *more), error.fix.rstrip("."))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
