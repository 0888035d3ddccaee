"""What ended a run, or what slows it: one paragraph from the evidence in its folder.

Rules are tried in order; the first that finds its evidence speaks. Where none does, the answer is ``unknown``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpctrain.errors import ExitCode
from hpctrain.report.summary import phase_share
from hpctrain.run import ORDERLY, Outcome, RunHistory
from hpctrain.run.events import CheckpointFailed, CheckpointSaved, Hang, RunFinished, StopRequested, Straggler
from hpctrain.run.last_words import LastWord
from hpctrain.run.verdict import Action, Verdict

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


def explain(data: RunHistory) -> Explanation:
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


def newest_error(data: RunHistory) -> Error | None:
    """The failure that ended the newest attempt; none if it ended well or has not ended."""
    newest = data.run.newest
    if newest is None:
        return None
    words = data.run.words.get(newest.number)
    failed = sorted((word for word in words.ranks if word.error), key=lambda word: word.ended or 0) if words else []
    verdict = newest.verdict or (words.verdict if words else None) or _own_verdict(failed)
    if verdict is None or verdict.action in (Action.DONE, Action.STOP) or verdict.exit_code in ORDERLY:
        return None
    error = next((word.error for word in failed if word.rank == verdict.rank), None)
    return Error(
        attempt=newest.number,
        rank=verdict.rank,
        host=verdict.host,
        what=verdict.reason,
        fix=verdict.fix,
        type=error.type if error else "",
        cause=verdict.cause or "",
    )


def _own_verdict(failed: Sequence[LastWord]) -> Verdict | None:
    """What the first failed rank said, if no supervisor lived to conclude anything from it."""
    for word in failed:
        assert word.error is not None, "that is what failed means here"
        code = ExitCode(word.exit_code) if word.exit_code in set(ExitCode) else ExitCode.FAILURE
        return Verdict(Action.REQUEUE, code, word.error.what, word.error.fix, word.rank, word.host, cause="error")
    return None


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


def by_message(data: RunHistory) -> Explanation | None:
    """An error whose text tells its cause."""
    error = newest_error(data)
    if error is None:
        return None
    for cause, pattern, title in PATTERNS:
        if re.search(pattern, error.what):
            return _of_error(cause, title, error)
    return None


def by_verdict(data: RunHistory) -> Explanation | None:
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
    hangs = [event for event in data.all(Hang) if event.attempt == error.attempt]
    evidence = [event.text for event in hangs[-1:]]
    return _of_error(error.cause, titles[error.cause], error, evidence)


def by_hang(data: RunHistory) -> Explanation | None:
    """The monitor reported a hang in an attempt that did not end well, or has not ended."""
    hang, newest = data.last(Hang), data.run.newest
    open_ended = (Outcome.FAILED, Outcome.RUNNING, Outcome.UNKNOWN)
    if not hang or newest is None or hang.attempt != newest.number or data.run.outcome not in open_ended:
        return None
    said = hang.sentence or f"no step completed after step {hang.step}"
    return Explanation(
        "hang", "The run hangs", (said,), "look at the stacks in monitor/, then hpctrain stop or cancel it"
    )


def by_error(data: RunHistory) -> Explanation | None:
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


def by_stop(data: RunHistory) -> Explanation | None:
    """Stopped on request, by a person or by the time limit."""
    if data.run.outcome not in (Outcome.STOPPED_BY_RANKS, Outcome.STOPPED):
        return None
    request = data.last(StopRequested)
    by = (request.by if request else None) or "a request"
    timed = "USR1" in by or "time limit" in by
    where = f"{by} was seen at step {request.step}" if request else f"{by} was seen"
    saved = data.last(CheckpointSaved)
    kept = f"the newest checkpoint is of step {saved.step}" if saved else "no checkpoint was saved"
    title = "The time limit came near and the run stopped" if timed else "The run was asked to stop"
    return Explanation(
        "time_limit" if timed else "stopped", title, (where, kept), "the same command goes on from there"
    )


def by_completion(data: RunHistory) -> Explanation | None:
    """Ended as planned."""
    reached = data.run.outcome
    if reached not in (Outcome.COMPLETED, Outcome.EARLY, Outcome.DONE):
        return None
    finished = data.last(RunFinished)
    step = finished.step if finished else "the last"
    is_early = reached is Outcome.EARLY
    title = "The run ended early: its metric no longer improved" if is_early else "The run completed"
    attempts = len(data.run.attempts) or 1
    evidence = f"it reached step {step} in {attempts} attempt{'s' if attempts > 1 else ''}"
    return Explanation("completed", title, (evidence,))


def by_life(data: RunHistory) -> Explanation | None:
    """Still going on."""
    if data.run.outcome is not Outcome.RUNNING or not data.train:
        return None
    return Explanation("running", "The run goes on")


def unknown(data: RunHistory) -> Explanation:
    """No evidence."""
    missing = [
        name
        for name, there in (("events", data.counts), ("attempts", data.run.attempts), ("last words", data.run.words))
        if not there
    ]
    evidence = (
        f"the run folder has no {', no '.join(missing)}" if missing else "nothing in the run folder says how it ended"
    )
    return Explanation(
        "unknown", "It is unknown what ended this run", (evidence,), "look at the job's own log and at logs/"
    )


# What slows the run


def stragglers(data: RunHistory) -> list[Explanation]:
    """Confirmed slow ranks that cost something."""
    worst: dict[tuple[object, ...], Straggler] = {}
    for event in data.all(Straggler):
        key = (event.kind, event.rank, event.cause)
        if event.state == "confirmed" and (event.cost or 0) >= COSTLY:
            worst[key] = max(worst.get(key, event), event, key=lambda each: each.cost or 0)
    ordered = sorted(worst.values(), key=lambda event: -(event.cost or 0))
    return [
        Explanation("straggler", _capital(event.sentence or f"rank {event.rank} is slow"), (), "")
        for event in ordered[:3]
        if event.rank is not None or event.host
    ]


def phases(data: RunHistory) -> list[Explanation]:
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


def failed_checkpoints(data: RunHistory) -> list[Explanation]:
    """Checkpoints that could not be written."""
    failed = data.last(CheckpointFailed)
    if not failed:
        return []
    count = data.counts.get(CheckpointFailed.NAME, 1)
    which = "1 checkpoint" if count == 1 else f"{count} checkpoints"
    title = f"{which} could not be written, the last at step {failed.step}: {failed.error}"
    return [Explanation("checkpoint_failed", title, (), "free space in the run folder")]


Rule = Callable[[RunHistory], Explanation | None]
RULES: tuple[Rule, ...] = (by_message, by_verdict, by_hang, by_error, by_stop, by_completion, by_life)
SLOW = (stragglers, failed_checkpoints, phases)


def _of_error(cause: str, title: str, error: Error, more: Sequence[str] = ()) -> Explanation:
    said = error.what if error.rank is None or f"rank {error.rank}" in error.what else f"{error.where}: {error.what}"
    return Explanation(cause, title, (said, *more), error.fix.rstrip("."))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
