"""What the end of an attempt means: a pure function from last words to a decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpctrain.errors import ExitCode, Replaced
from hpctrain.run.last_words import GOOD_ENDINGS, Ending, LastWord

NODE = "node"
"""Cause of a verdict: a node was lost, or could not start its ranks."""
PREFLIGHT = "preflight"
"""Cause of a verdict: something was wrong before any rank was started."""
REPLACED = "replaced"
"""Cause of a verdict: a newer attempt has taken over, to which the run and its jobs belong now."""


class Action(StrEnum):
    """What a supervisor does next."""

    DONE = "done"
    """The run has reached its end."""
    STOP = "stop"
    """Stopped because a person asked for it: the same command resumes it, nobody else does."""
    REQUEUE = "requeue"
    """Start another attempt: it goes on from the last checkpoint."""
    FAIL = "fail"
    """Another attempt would fail the same way: something has to be corrected first."""
    DO_NOT_REQUEUE = "do_not_requeue"
    """Attempts fail again and again, or do not progress."""


@dataclass(frozen=True)
class Verdict:
    """The decision, its exit code, and one sentence each for why and what to do."""

    action: Action
    exit_code: ExitCode
    reason: str
    fix: str = ""
    rank: int | None = None
    """First rank that failed."""
    host: str | None = None
    """Its host."""
    cause: str | None = None
    """error, killed, out_of_memory, node, hang, vanished, preflight, replaced; none where nothing failed."""

    def to_json(self) -> dict[str, Any]:
        """For run.json and the last words."""
        return {
            "action": self.action.value,
            "exit_code": int(self.exit_code),
            "reason": self.reason,
            "fix": self.fix,
            "rank": self.rank,
            "host": self.host,
            "cause": self.cause,
        }


def replaced(error: Replaced) -> Verdict:
    """On an attempt that may not write any more, whatever became of its ranks."""
    return Verdict(Action.DO_NOT_REQUEUE, error.exit_code, error.what, error.fix, cause=REPLACED)


@dataclass(frozen=True)
class Stop:
    """A request to stop that this attempt got."""

    by: str
    """Who asked."""
    by_person: bool
    """Whether somebody wants the run to stay stopped, rather than a scheduler that needs the nodes."""


def decide(
    words: Sequence[LastWord],
    attempts: Sequence[Mapping[str, Any]],
    max_failures: int,
    stop: Stop | None = None,
    failure: Verdict | None = None,
    saves: bool = True,
) -> Verdict:
    """What the end of the newest attempt means.

    Args:
        words: last word of every expected rank, those that the supervisor wrote included.
        attempts: entries of run.json, oldest first, the one that has just ended last. Read are ``from_step`` and
            ``to_step`` (newest checkpoint when it began and when it ended; None where there was none) and ``verdict``.
        max_failures: failed attempts in a row without a new checkpoint after which the run ends.
        stop: the stop request of this attempt, if there was one.
        failure: what the supervisor itself ended the attempt for (a hang, ranks that never appeared), if it did.
        saves: whether the run saves checkpoints. Where it does not, progress is unknown.

    Returns:
        DONE or STOP or REQUEUE for orderly ends; for others REQUEUE while trying again makes sense.
    """
    if failure is None and words and all(word.ending in GOOD_ENDINGS for word in words):
        return _orderly(words, attempts, stop, saves)
    found = failure or blame(words)
    if found.action is not Action.REQUEUE:
        return found
    if stop is not None and stop.by_person:
        return _replace(found, Action.STOP, found.exit_code, f"{found.reason}, after {stop.by} had asked it to stop")
    failures = trailing_failures(attempts)
    if found.cause != NODE and failures >= max_failures:
        several = f"{failures} attempts in a row failed without a new checkpoint; the last one: {found.reason}"
        reason = several if failures > 1 else f"{found.reason}, without a new checkpoint; launch.max_failures is 1"
        return _replace(found, Action.DO_NOT_REQUEUE, ExitCode.DO_NOT_REQUEUE, reason)
    return found


def blame(words: Sequence[LastWord]) -> Verdict:
    """The first cause of a failed attempt, with the action REQUEUE where trying again may help.

    A rank that died without an error of its own comes first, for the errors of others are then its consequences
    (broken connections); among errors the earliest is the cause.
    """
    killed = [word for word in words if word.ending is Ending.KILLED]
    if killed:
        return _blame_death(killed[0])
    failed = sorted((word for word in words if word.ending is Ending.FAILED), key=lambda word: word.ended or 0)
    if failed:
        return _blame_error(failed)
    missing = [word for word in words if word.ending not in GOOD_ENDINGS]
    if not missing:
        return _failure("no rank left a last word: the ranks never started", "see the launcher's log", "vanished")
    ranks = ", ".join("?" if word.rank is None else str(word.rank) for word in missing[:8])
    plural = "s" if len(missing) > 1 else ""
    return _failure(
        f"rank{plural} {ranks} ended without a word" + (f" ({missing[0].note})" if missing[0].note else ""),
        "see the logs of the ranks and of the launcher",
        "vanished",
        missing[0],
    )


def trailing_failures(attempts: Sequence[Mapping[str, Any]]) -> int:
    """Failed attempts at the end of the list, the newest included, that saved no new checkpoint.

    Those that a node failed, or that a newer attempt replaced, are left out: they say nothing of the run.
    """
    count, next_from = 0, None
    for index, attempt in enumerate(reversed(attempts)):
        verdict = dict(attempt.get("verdict") or {}) if index > 0 else {}
        # One that was killed with its supervisor has no end: the next one tells how far it came.
        ended = {"to_step": next_from, **attempt}
        if verdict.get("exit_code") in (ExitCode.DONE, ExitCode.STOPPED) or progressed(ended):
            break
        count += verdict.get("cause") not in (NODE, REPLACED)
        next_from = attempt.get("from_step")
    return count


def progressed(attempt: Mapping[str, Any]) -> bool:
    """Whether the attempt saved a checkpoint beyond the one it began from."""
    first, last = attempt.get("from_step"), attempt.get("to_step")
    return last is not None and (first is None or last > first)


def _orderly(
    words: Sequence[LastWord], attempts: Sequence[Mapping[str, Any]], stop: Stop | None, saves: bool
) -> Verdict:
    step = max((word.step or 0 for word in words), default=0)
    if not any(word.ending is Ending.STOPPED for word in words):
        early = any(word.ending is Ending.EARLY for word in words)
        when = f" after step {step}" if saves else ""
        return Verdict(Action.DONE, ExitCode.DONE, ("stopped early" if early else "done") + when)
    by, again = stop.by if stop else "a request", "the same command resumes it"
    if not saves and not (stop and stop.by_person):
        reason = f"stopped by {by}" if stop else f"asked to be run again (exit code {ExitCode.STOPPED:d})"
        return Verdict(Action.REQUEUE, ExitCode.STOPPED, reason, again)
    if stop is None or stop.by_person:
        return Verdict(Action.STOP, ExitCode.STOPPED, f"stopped by {by} at step {step}", again)
    if attempts and not progressed(attempts[-1]):
        return Verdict(
            Action.DO_NOT_REQUEUE,
            ExitCode.DO_NOT_REQUEUE,
            f"stopped by {by} at step {step} without a new checkpoint: another attempt would come no further",
            "give the job more time, or let it signal its end earlier",
        )
    return Verdict(Action.REQUEUE, ExitCode.STOPPED, f"stopped by {by} at step {step}", again)


def _blame_death(word: LastWord) -> Verdict:
    memory = word.note is not None and "memory" in word.note
    fix = "ask for more memory, or lower the batch, the prefetch or the workers" if memory else "see the rank's log"
    reason = f"rank {word.rank} on {word.host} {word.note or 'died'}"
    by_signal = word.exit_code is not None and word.exit_code > 128
    return _failure(reason, fix, "out_of_memory" if memory else "killed" if by_signal else "vanished", word)


def _blame_error(failed: Sequence[LastWord]) -> Verdict:
    first = failed[0]
    assert first.error is not None, "a FAILED word holds its error"
    everywhere = len(failed) > 1 and Counter(word.error.what for word in failed if word.error)[first.error.what] > 1
    where = "" if everywhere or first.rank is None else f"rank {first.rank} on {first.host}: "
    if first.error.type == Replaced.__name__:
        return replaced(Replaced(first.error.what, first.error.fix))
    code = ExitCode(first.exit_code) if first.exit_code in set(ExitCode) else ExitCode.FAILURE
    action = Action.FAIL if code in (ExitCode.USER_ERROR, ExitCode.DO_NOT_REQUEUE) else Action.REQUEUE
    return Verdict(action, code, where + first.error.what, first.error.fix, first.rank, first.host, "error")


def _failure(reason: str, fix: str, cause: str, word: LastWord | None = None) -> Verdict:
    rank, host = (word.rank, word.host) if word else (None, None)
    return Verdict(Action.REQUEUE, ExitCode.FAILURE, reason, fix, rank, host, cause)


def _replace(verdict: Verdict, action: Action, code: ExitCode, reason: str) -> Verdict:
    return Verdict(action, code, reason, verdict.fix, verdict.rank, verdict.host, verdict.cause)
