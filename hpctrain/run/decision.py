"""Decides the verdict on an attempt from its ranks' last words. Pure functions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from hpctrain.errors import GENERAL, Code, ExitCode, Replaced
from hpctrain.run.attempts import Attempt
from hpctrain.run.first_cause import FINAL, first_cause, is_victim
from hpctrain.run.grid import Grid
from hpctrain.run.last_words import GOOD_ENDINGS, Ending, LastWord
from hpctrain.run.verdict import FIXES, Action, RunVerdict, Stop, failed_with, replaced


def decide(
    words: Sequence[LastWord],
    attempts: Sequence[Attempt],
    max_failures: int,
    stop: Stop | None = None,
    failure: RunVerdict | None = None,
    saves: bool = True,
    before: Sequence[LastWord] = (),
) -> RunVerdict:
    """Returns the verdict on the newest attempt.

    Args:
        words: last word of every expected rank, including those that the supervisor filled in.
        attempts: the run's attempts, oldest first; the last one has just ended.
        max_failures: consecutive failed attempts without a new checkpoint after which the run ends; 0: the first
            failure ends it, with its own exit code.
        stop: the stop request of this attempt, if there was one.
        failure: why the supervisor itself ended the attempt (a hang, ranks that never appeared), if it did.
        saves: whether hpctrain saves the checkpoints. If not, progress is known once the program has reported one.
        before: last words of the attempt before, whose error this one may repeat.

    Returns:
        For orderly ends DONE, STOP or REQUEUE, or DO_NOT_REQUEUE if a scheduler's stop came without a new checkpoint.
        For failures REQUEUE as long as another attempt makes sense.
    """
    if failure is None and (words or stop) and all(word.ending in GOOD_ENDINGS for word in words):
        return _orderly(words, attempts, stop, saves)
    found = failure or blame(words, attempts[-1].grid if attempts else None)
    if found.action is not Action.REQUEUE:
        return found
    if stop is not None and stop.by_person:
        asked = "" if stop.by in found.reason else f", after {stop.by} had asked it to stop"
        return dataclasses.replace(found, action=Action.STOP, reason=found.reason + asked)
    if found.code is Code.NODE:
        return found
    knows = saves or (bool(attempts) and attempts[-1].to_step is not None)
    if found.code is Code.STOP and knows and attempts and not attempts[-1].has_progressed:
        return _no_further(found.reason)
    if max_failures == 0:
        return dataclasses.replace(found, action=Action.DO_NOT_REQUEUE)
    failures = trailing_failures(attempts)
    code = Code.NO_PROGRESS if found.code in (*GENERAL, Code.UNKNOWN) else found.code
    where = repeats(words, before) if failure is None else ""
    if failures >= max_failures:
        several = f"{failures} attempts in a row failed without a new checkpoint; the last one: {found.reason}"
        reason = several if failures > 1 else f"{found.reason}, without a new checkpoint; launch.max_failures is 1"
    elif where:
        reason = f"{found.reason}, for the second time {where}"
    else:
        return found
    return dataclasses.replace(
        found, action=Action.DO_NOT_REQUEUE, exit_code=ExitCode.DO_NOT_REQUEUE, reason=reason, code=code
    )


def blame(words: Sequence[LastWord], grid: Grid | None = None) -> RunVerdict:
    """Returns the verdict for the first cause of a failed attempt; its action is REQUEUE if retrying may help.

    See ``first_cause``. With ``grid``, ranks that share a model are named with their place in it.
    """
    grid = grid or Grid(1)
    first = first_cause(words)
    if isinstance(first, LastWord):
        failed = [word for word in words if word.ending is Ending.FAILED]
        return _blame_error(first, failed, grid) if first in failed else _blame_death(first, grid)
    missing = [word for word in words if word.ending not in GOOD_ENDINGS]
    if not missing:
        return failed_with(Code.VANISHED, "no exit record was left: the ranks never started", "see the launcher's log")
    ranks = ", ".join("?" if word.rank is None else f"{word.rank}{_place(word, grid)}" for word in missing[:8])
    plural = "s" if len(missing) > 1 else ""
    return failed_with(
        Code.VANISHED,
        f"rank{plural} {ranks} left no exit record" + (f" ({missing[0].note})" if missing[0].note else ""),
        "see the logs of the ranks and of the launcher",
        missing[0].rank,
        missing[0].host,
    )


def repeats(words: Sequence[LastWord], before: Sequence[LastWord]) -> str:
    """Returns "at step N" or "before the first step" if both attempts ended there with the same error; else empty.

    Only errors of the task's own code with the same text count, and a full disk. The last output of a plain command
    does not count, nor do other file system errors, which may be temporary.
    """
    now, earlier = first_cause(words), first_cause(before)
    if not (isinstance(now, LastWord) and isinstance(earlier, LastWord) and now.error and earlier.error):
        return ""
    full = now.error.code is earlier.error.code is Code.DISK_FULL  # its text varies with the free space
    same = full or (now.error.what, now.error.type) == (earlier.error.what, earlier.error.type)
    own = full or now.error.code in (Code.EXCEPTION, Code.NAN)
    if not same or not own or now.step != earlier.step or is_victim(now) or now.error.type == "exit":
        return ""
    return "before the first step" if now.step is None else f"at step {now.step}"


def starts_again(verdict: RunVerdict, asked: bool) -> bool:
    """Whether to start another attempt in the same place; ``asked``: a stop was requested meanwhile.

    After an orderly end the place is given back; a failure before the ranks started would repeat.
    """
    failed = verdict.action is Action.REQUEUE and verdict.exit_code is not ExitCode.STOPPED
    return failed and not verdict.before_ranks and not asked


def trailing_failures(attempts: Sequence[Attempt]) -> int:
    """Counts the failed attempts at the end of the list, including the newest, that saved no new checkpoint.

    Attempts that lost a node or were replaced by a newer attempt do not count: they say nothing about the run.
    """
    count, next_from = 0, None
    for index, attempt in enumerate(reversed(attempts)):
        verdict = attempt.verdict if index > 0 else None
        if attempt.ended is None and attempt.to_step is None:
            # Killed together with its supervisor, so no end is recorded: the next attempt shows how far it got.
            attempt = dataclasses.replace(attempt, to_step=next_from)
        if attempt.has_progressed or (verdict and verdict.exit_code in (ExitCode.DONE, ExitCode.STOPPED)):
            break
        count += verdict is None or verdict.code not in (Code.NODE, Code.IN_USE)
        next_from = attempt.from_step
    return count


def _orderly(words: Sequence[LastWord], attempts: Sequence[Attempt], stop: Stop | None, saves: bool) -> RunVerdict:
    step = max((word.step or 0 for word in words), default=0)
    if words and not any(word.ending is Ending.STOPPED for word in words):
        early = any(word.ending is Ending.EARLY for word in words)
        when = f" after step {step}" if saves else ""
        return RunVerdict(
            Action.DONE, ExitCode.DONE, ("stopped early" if early else "done") + when, code=Code.COMPLETED
        )
    again = "the same command resumes it"
    code = stop.code if stop else Code.STOPPED
    at = f" at step {step}" if step or saves else ""
    if not words:
        at = " before any rank began"
    reason = f"stopped by {stop.by if stop else 'a request'}{at}"
    if not saves and not (stop and stop.by_person):
        reason = f"stopped by {stop.by}" if stop else f"asked to be run again (exit code {ExitCode.STOPPED:d})"
        saved = attempts[-1].to_step if attempts else None
        perhaps_done = bool(words) and all(word.exit_code == ExitCode.DONE for word in words)
        if saved is not None and not attempts[-1].has_progressed and not perhaps_done:
            return _no_further(reason)
        reason += "" if saved is None else f", with a checkpoint of step {saved}"
        return RunVerdict(Action.REQUEUE, ExitCode.STOPPED, reason, again, code=code)
    if stop is None or stop.by_person:
        return RunVerdict(Action.STOP, ExitCode.STOPPED, reason, again, code=code)
    if words and attempts and not attempts[-1].has_progressed:
        return _no_further(reason)
    return RunVerdict(Action.REQUEUE, ExitCode.STOPPED, reason, again, code=code)


def _no_further(reason: str) -> RunVerdict:
    """Returns the verdict on an attempt that was stopped before it could save."""
    return RunVerdict(
        Action.DO_NOT_REQUEUE,
        ExitCode.DO_NOT_REQUEUE,
        f"{reason} without a new checkpoint: another attempt would get no further",
        "give the job more time, or let it signal its end earlier",
        code=Code.NO_PROGRESS,
    )


def _blame_death(word: LastWord, grid: Grid) -> RunVerdict:
    code = word.code or Code.VANISHED
    early = f"ended with exit code {word.exit_code} before the others" if word.ending in GOOD_ENDINGS else ""
    what = f"rank {word.rank}{_place(word, grid)} on {word.host} {word.note or early or 'died'}"
    return failed_with(code, what, FIXES.get(code, "see the rank's log"), word.rank, word.host)


def _blame_error(first: LastWord, failed: Sequence[LastWord], grid: Grid) -> RunVerdict:
    error = first.error
    assert error is not None, "a FAILED word holds its error"
    everywhere = Counter(word.error.what for word in failed if word.error)[error.what] > 1
    where = "" if everywhere or first.rank is None else f"rank {first.rank}{_place(first, grid)} on {first.host}: "
    if error.code is Code.IN_USE:
        return replaced(Replaced(error.what, error.fix))
    code = ExitCode(first.exit_code) if first.exit_code in set(ExitCode) else ExitCode.FAILURE
    action = Action.FAIL if code in FINAL else Action.REQUEUE
    return RunVerdict(action, code, where + error.what, error.fix, first.rank, first.host, error.code)


def _place(word: LastWord, grid: Grid) -> str:
    """Returns a rank's place, to follow its number; empty if each rank has the whole model."""
    return grid.label(word.rank) if word.rank is not None and word.rank < grid.ranks else ""
