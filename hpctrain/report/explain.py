"""What ended a run, or what slows it: one paragraph from the evidence in its folder.

Rules are tried in order; the first that finds its evidence speaks. Where none does, the answer is ``unknown``. They
decide by codes; what people read is made here, last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import Code
from hpctrain.report.summary import phase_share, state
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.decision import blame
from hpctrain.run.events import Event
from hpctrain.run.history import RunData
from hpctrain.run.last_words import AttemptWords
from hpctrain.run.verdict import Verdict

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

    cause: Code
    """For scripts."""
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
    if found.cause in (Code.COMPLETED, Code.RUNNING) and slow:
        first = slow[0]
        title = found.title.rstrip(".") + "; " + first.title[0].lower() + first.title[1:]
        cause = first.cause if found.cause is Code.RUNNING else found.cause
        rest = tuple(finding.title for finding in slow[1:])
        return Explanation(cause, title, (*found.evidence, *first.evidence), first.advice or found.advice, rest)
    findings = tuple(finding.title for finding in slow)
    return Explanation(found.cause, found.title, found.evidence, found.advice, findings)


# What ended the run


TITLES: Mapping[Code, str] = {
    Code.NAN: "The loss became NaN or infinite",
    Code.SINGLETONS: "The ranks did not find each other",
    Code.DISK_FULL: "A disk was full",
    Code.READ_ONLY: "A file system cannot be written",
    Code.UNREADABLE_CHECKPOINT: "A file system did not give a checkpoint",
    Code.DAMAGED_CHECKPOINT: "No sound checkpoint was found",
    Code.HOROVOD: "Horovod cannot be used",
    Code.OUT_OF_MEMORY: "Memory ran out",
    Code.IN_USE: "Another live run holds the run folder",
    Code.PREFLIGHT: "The job could not begin",
    Code.KILLED: "A rank was killed",
    Code.NODE: "A node failed",
    Code.HANG: "The run hung",
    Code.VANISHED: "A rank ended without a word",
    Code.STOP: "The ranks did not stop in time",
    Code.TIME_LIMIT: "The time limit came near and the run stopped",
    Code.STOPPED: "The run was asked to stop",
    Code.USER_ERROR: "The run file, its data or its environment is wrong",
    Code.NO_PROGRESS: "Attempts came no further",
    Code.EXCEPTION: "A rank failed with an error",
}
"""What each code of a failure says to people."""
GENERAL = (Code.USER_ERROR, Code.EXCEPTION, Code.NO_PROGRESS, Code.UNKNOWN)
"""Codes of failures than which a hang that the monitor saw is more precise."""


def newest_attempt(data: RunData) -> Attempt | None:
    """The newest attempt that run.json tells of."""
    attempts = data.info.get("attempts") or []
    return Attempt.from_json(attempts[-1]) if attempts else None


def newest_failure(data: RunData) -> Verdict | None:
    """The verdict on the newest attempt if it failed; none where it ended well or has not ended."""
    attempt = newest_attempt(data)
    if attempt is None:
        return None
    words = data.words.get(attempt.number)
    verdict = attempt.verdict or (words and (words.verdict or _own_verdict(words)))
    return verdict if verdict and verdict.is_failure else None


def _own_verdict(words: AttemptWords) -> Verdict | None:
    """What the first failed rank said, where no supervisor lived to conclude anything from it."""
    failed = [word for word in words.ranks if word.error]
    return blame(failed) if failed else None


def hang(data: RunData) -> Event | None:
    """The newest hang that the monitor saw in the newest attempt, unless that got out of it."""
    attempt = newest_attempt(data)
    seen = [event for event in data.rare.get("hang", []) if attempt and event["attempt"] == attempt.number]
    return seen[-1] if seen and seen[-1].get("state") != "cleared" else None


def by_cause(data: RunData) -> Explanation | None:
    """A failure whose cause is known."""
    failure = newest_failure(data)
    if failure is None or failure.code in GENERAL:
        return None
    seen = str((hang(data) or {}).get("sentence") or "")
    return _of_failure(data, failure, [seen] if seen and seen not in failure.reason else [])


def by_hang(data: RunData) -> Explanation | None:
    """The monitor reported a hang in an attempt that did not end well, or has not ended."""
    seen = hang(data)
    if seen is None or state(data) not in ("failed", "running", "unknown"):
        return None
    said = str(seen.get("sentence") or f"no step completed after step {seen['step']}")
    return Explanation(
        Code.HANG, "The run hangs", (said,), "look at the stacks in monitor/, then hpctrain stop or cancel it"
    )


def by_failure(data: RunData) -> Explanation | None:
    """Any other failure: the user's mistake, an exception, or what nobody has given a code."""
    failure = newest_failure(data)
    return _of_failure(data, failure) if failure else None


def by_stop(data: RunData) -> Explanation | None:
    """Stopped on request, by a person or by the time limit."""
    if state(data) not in ("stop_requested", "stop"):
        return None
    request = data.last("stop_requested")
    by = str(request.get("by") or "a request")
    attempt = newest_attempt(data)
    told = attempt.verdict.code if attempt and attempt.verdict else Code.UNKNOWN
    timed = Code.TIME_LIMIT in (told, Code.read(request.get("code")))
    code = Code.TIME_LIMIT if timed else Code.STOPPED
    where = f"{by} was seen at step {request['step']}" if request else f"{by} was seen"
    saved = data.last("checkpoint_saved")
    kept = f"the newest checkpoint is of step {saved['step']}" if saved else "no checkpoint was saved"
    return Explanation(code, TITLES[code], (where, kept), "the same command resumes from there")


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
    return Explanation(Code.COMPLETED, title, (evidence,))


def by_life(data: RunData) -> Explanation | None:
    """Still going on."""
    if state(data) != "running" or not data.train:
        return None
    return Explanation(Code.RUNNING, "The run goes on")


def unknown(data: RunData) -> Explanation:
    """No evidence, or none that has a code: then the verdict's own words are shown."""
    attempt = newest_attempt(data)
    if attempt and attempt.verdict and attempt.verdict.reason:
        verdict = attempt.verdict
        return Explanation(Code.UNKNOWN, "The newest attempt has ended", (verdict.reason,), verdict.fix.rstrip("."))
    missing = [
        name
        for name, there in (("events", data.counts), ("run.json", data.info), ("last words", data.words))
        if not there
    ]
    evidence = (
        f"the run folder has no {', no '.join(missing)}" if missing else "nothing in the run folder says how it ended"
    )
    return Explanation(
        Code.UNKNOWN, "It is unknown what ended this run", (evidence,), "look at the job's own log and at logs/"
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
        Explanation(Code.STRAGGLER, _capital(str(event.get("sentence") or f"rank {event.get('rank')} is slow")), (), "")
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
        found.append(Explanation(Code.DATA_BOUND, f"{share['data']:.0%} of the time waits for data", (), advice))
    if share.get("exchange", 0) > EXCHANGE_BOUND:
        advice = (
            "use a larger batch per rank, train.accumulate, or reduce.compression: fp16; hpctrain bench step measures"
        )
        title = f"{share['exchange']:.0%} of the time waits for the exchange of gradients"
        found.append(Explanation(Code.EXCHANGE_BOUND, title, (), advice))
    return found


def failed_checkpoints(data: RunData) -> list[Explanation]:
    """Checkpoints that could not be written."""
    failed = data.last("checkpoint_failed")
    if not failed:
        return []
    count = data.counts.get("checkpoint_failed", 1)
    which = "1 checkpoint" if count == 1 else f"{count} checkpoints"
    title = f"{which} could not be written, the last at step {failed['step']}: {failed.get('error')}"
    return [Explanation(Code.CHECKPOINT_FAILED, title, (), "free space in the run folder")]


Rule = Callable[[RunData], Explanation | None]
RULES: tuple[Rule, ...] = (by_cause, by_hang, by_failure, by_stop, by_completion, by_life)
SLOW = (stragglers, failed_checkpoints, phases)


def _of_failure(data: RunData, failure: Verdict, more: Sequence[str] = ()) -> Explanation:
    attempt = newest_attempt(data)
    host = f" on {failure.host}" if failure.host else ""
    where = f"rank {failure.rank}{host}, attempt {attempt.number}: " if attempt else ""
    told = failure.rank is None or f"rank {failure.rank}" in failure.reason
    title = TITLES.get(failure.code, "The run failed")
    return Explanation(
        failure.code, title, (failure.reason if told else where + failure.reason, *more), failure.fix.rstrip(".")
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
