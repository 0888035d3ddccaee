"""Finds what went wrong first in a failed attempt, from all known facts, in whatever order they arrived. Pure."""

from __future__ import annotations

import math
import re
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto

from hpctrain.errors import Code, ExitCode
from hpctrain.run.last_words import GOOD_ENDINGS, Ending, LastWord
from hpctrain.run.verdict import RunVerdict
from hpctrain.system.signals import signal_name

FINAL = (ExitCode.USER_ERROR, ExitCode.DO_NOT_REQUEUE)
"""Exit codes of errors that every attempt would repeat."""
LATE_NOTE_S = 2.0
"""Seconds by which an agent on a busy node may note a death late. Ranks wait longer before they abort the others."""
TOGETHER_S = 15.0
"""Seconds within which one rank's failure makes others fail: libraries give up when a connection closes."""
MPI_ERR_UNKNOWN = 14
"""Exit code of Open MPI 4 and 5 when their runtime reports that another rank is lost."""
ABORTS = (128 + signal.SIGABRT, 128 + signal.SIGPIPE)
"""Exit codes of processes that abort by themselves, as Gloo and NCCL do when a peer is gone."""
ENDED_BY_OTHERS = (MPI_ERR_UNKNOWN, 128 + signal.SIGTERM)
"""Exit codes of processes that MPI or a launcher ended because of another one."""
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|closed by peer|remote peer|lost peer"
    r"|remote process|DistNetworkError|DistStoreError|for the other ranks to|NCCL error|socket closed"
    r"|Horovod has been shut down|MPI_ERR_PROC_FAILED",
    re.IGNORECASE,
)
"""Matches messages of errors whose cause is in another process."""


class Standing(IntEnum):
    """How well a fact explains the end of an attempt, best first: the known fact that ranks highest is the cause."""

    FINAL = auto()
    """A rank's own error that every attempt would repeat."""
    HUNG = auto()
    """The monitor ended ranks because none of them made progress."""
    ENDED = auto()
    """The supervisor ended the attempt."""
    NODE = auto()
    """The launcher lost a node, or could not start ranks there."""
    NOTED = auto()
    """A death noted by its node's agent, before all others on that node and before any rank's own error, and not as
    one of those that a launcher kills together."""
    REPORTED = auto()
    """A death that the launcher reports and did not cause."""
    SAID = auto()
    """A rank's own error."""
    LAUNCHER = auto()
    """The launcher was killed; its ranks died with it."""
    LEFT = auto()
    """A rank exited with 0 without a last word, as the launcher reports only other exit codes."""
    KILLED = auto()
    """A death that the launcher reports and may have caused, or that of a rank that never left a word."""
    CUT_OFF = auto()
    """The monitor could not reach a host, and its ranks left no last word."""
    ABORTED = auto()
    """A rank aborted by itself without saying why."""
    SWEPT = auto()
    """A death noted by its node's agent when other processes of the job died there too, or one that the launcher
    reports while it ends the job: the launcher has probably caused it."""
    SEEN = auto()
    """The supervisor found that a process was gone, and the launcher did not react."""
    GONE = auto()
    """The monitor found that a process was gone."""
    VICTIM = auto()
    """A rank ended because another rank had ended."""
    COMPLAINED = auto()
    """A rank's error whose cause is in another process, or that came long after the first error."""
    LATER = auto()
    """A death after one that could have caused it."""


@dataclass(frozen=True)
class Death:
    """One source's report on the death of one process."""

    rank: int | None = None
    pid: int | None = None
    host: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    out_of_memory: bool = False
    standing: Standing = Standing.REPORTED
    at: float | None = None
    """Unix seconds, if its node's agent noted it."""
    order: float = field(default=math.inf, compare=False)
    """Place of the report among the launcher's; infinity if it is not one of several."""

    @property
    def cause(self) -> str:
        """The cause as a predicate, to follow the rank: 'was killed by SIGKILL'."""
        if self.out_of_memory:
            return "was killed by the kernel: out of memory"
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}"
        if self.exit_code == MPI_ERR_UNKNOWN:
            return f"exited with code {self.exit_code}, as MPI does when another rank is lost"
        return f"exited with code {self.exit_code}" if self.exit_code else "exited during the run without an error"

    @property
    def code(self) -> Code:
        """The cause as a code. Shells and launchers report signals as exit codes from 129."""
        if self.out_of_memory:
            return Code.OUT_OF_MEMORY
        return Code.KILLED if (self.status or 0) > 128 else Code.VANISHED

    @property
    def status(self) -> int | None:
        """The exit code that a shell would show; None if unknown."""
        return self.exit_code if self.signal is None else 128 + self.signal


@dataclass(frozen=True)
class Found:
    """A fact about the attempt as a whole."""

    standing: Standing
    verdict: RunVerdict


Fact = LastWord | Death | Found


def first_cause(facts: Collection[Fact]) -> Fact | None:
    """Returns the fact that explains the others; None if no rank is known to have failed or died.

    Reports on the same rank's death from several sources count as one fact. A rank's own last word overrides them.
    """
    words = sorted((fact for fact in facts if isinstance(fact, LastWord)), key=lambda word: _number(word.rank))
    together = min((_ended(word) for word in words if word.ending is Ending.FAILED), default=0.0) + TOGETHER_S
    failed = [(_of_word(word, together), word) for word in words if word.ending in (Ending.FAILED, Ending.KILLED)]
    first_error = min((_ended(word) for standing, word in failed if standing is Standing.SAID), default=math.inf)
    whole = [fact for fact in facts if isinstance(fact, Found)]
    if any(fact.standing is Standing.LAUNCHER for fact in whole):
        first_error = -math.inf  # ranks died with the launcher, so no death is a first cause
    until: dict[str | None, float] = defaultdict(lambda: first_error)
    for standing, word in failed:  # only clocks of the same host are compared
        if standing is Standing.COMPLAINED:
            until[word.host] = min(until[word.host], _ended(word) + LATE_NOTE_S)
    deaths = _of_deaths([fact for fact in facts if isinstance(fact, Death)], words, until)
    ranked: list[tuple[Standing, tuple[float, float], float, Fact]] = []
    ranked += [(fact.standing, (0.0, 0.0), 0.0, fact) for fact in whole]
    ranked += [(standing, (0.0, _ended(word)), _number(word.rank), word) for standing, word in failed]
    ranked += [(death.standing, _place(death), _number(death.rank), death) for death in deaths]
    cause = min(ranked, key=lambda each: each[:3])[3] if ranked else None
    return _left_early(cause, words) or cause


def _left_early(cause: Fact | None, words: Iterable[LastWord]) -> LastWord | None:
    """Returns the rank of a plain program that ended, without an error, before the one that then lost its peer."""
    if not isinstance(cause, LastWord) or not cause.error or cause.error.type != "exit" or not is_victim(cause):
        return None
    before = [word for word in words if word.ending in GOOD_ENDINGS and _ended(word) < _ended(cause)]
    return min(before, key=_ended, default=None)


def is_victim(word: LastWord) -> bool:
    """Whether a rank ended the way ranks do when they lose a peer."""
    if _at_most(Standing.NOTED, word.exit_code) is not Standing.NOTED and (
        word.error is None or word.error.type == "exit"
    ):
        return True
    if word.error is None or word.error.code is Code.OUT_OF_MEMORY:  # always the process's own, also in NCCL's words
        return False
    return LOST_PEER.search(word.error.what) is not None


def _of_word(word: LastWord, together: float) -> Standing:
    """Returns the standing of a failed rank's last word.

    ``together`` is the Unix time until which errors may have the same cause.
    """
    if word.ending is Ending.KILLED:
        return _at_most(Standing.REPORTED, word.exit_code)
    if word.exit_code in FINAL:
        return Standing.FINAL
    return Standing.COMPLAINED if is_victim(word) or _ended(word) > together else Standing.SAID


def _of_deaths(reports: Iterable[Death], words: Collection[LastWord], until: Mapping[str | None, float]) -> list[Death]:
    """Merges reports into one death for each rank that did not say how it ended, with its standing.

    ``until`` is the Unix time, by host, from which deaths may be consequences of an error.
    """
    of_rank = {word.rank: word for word in words}
    known: dict[int, list[Death]] = defaultdict(list)
    for death in reports:
        rank = _rank_of(death, words) if death.rank is None else death.rank
        if rank is not None:
            known[rank].append(death)
    noted = {rank: min((one.at for one in each if one.at is not None), default=None) for rank, each in known.items()}
    hosts = {rank: of_rank[rank].host if rank in of_rank else None for rank in known}
    earliest: dict[str | None, float] = {}
    for rank, at in noted.items():
        if at is not None:
            earliest[hosts[rank]] = min(at, earliest.get(hosts[rank], at))
    found = []
    for rank, each in known.items():
        if rank in of_rank and of_rank[rank].ending is not Ending.RUNNING:
            continue
        at = noted[rank]
        how = max(each, key=lambda one: (one.out_of_memory, one.signal or 0, one.exit_code or 0, one.exit_code == 0))
        is_first = at == earliest.get(hosts[rank])
        standing = _at_most(_of_rank(each, at, is_first, until[hosts[rank]], how), how.status)
        standing = standing if rank in of_rank else max(standing, Standing.KILLED)
        order = min(one.order for one in each)
        found.append(Death(rank, None, None, how.signal, how.exit_code, how.out_of_memory, standing, at, order))
    return found


def _rank_of(death: Death, words: Collection[LastWord]) -> int | None:
    """Returns the rank of a process that is reported by its PID, which processes of other hosts may have too."""
    host = _short(death.host)
    is_known = any(_short(word.host) == host for word in words)  # else the launcher has another name for it
    found = [word.rank for word in words if word.pid == death.pid and (_short(word.host) == host or not is_known)]
    return found[0] if len(found) == 1 else None


def _short(host: str | None) -> str:
    return (host or "").partition(".")[0]


def _place(death: Death) -> tuple[float, float]:
    """Returns what orders deaths of equal standing: of those that may all be the launcher's doing, its own reports."""
    may_be_its_doing = death.standing in (Standing.KILLED, Standing.SWEPT)
    return death.order if may_be_its_doing else 0.0, math.inf if death.at is None else death.at


def _of_rank(each: Iterable[Death], at: float | None, is_first: bool, until: float, how: Death) -> Standing:
    """Returns the standing of a rank's death, before its exit code is considered.

    Deaths noted by one node's agent are in the right order, unless it noted them together; those that a launcher
    reports are not. ``is_first``: no earlier death was noted on the rank's node.
    """
    standings = {one.standing for one in each}
    if Standing.SWEPT in standings and (how.status == 0 or how.signal not in (None, signal.SIGKILL)):
        standings, is_first = {Standing.NOTED}, True  # not the launcher's doing
    standing = min(standings)
    if at is not None and at >= until:
        standing = Standing.LATER
    elif not is_first and (at is not None or standing in (Standing.KILLED, Standing.SWEPT)):
        standing = Standing.REPORTED if Standing.REPORTED in standings else Standing.LATER
    return max(standing, Standing.VICTIM) if Standing.VICTIM in standings else standing


def _at_most(standing: Standing, status: int | None) -> Standing:
    """Returns the standing, lowered if another rank's end may have caused this exit code."""
    if status in ENDED_BY_OTHERS:
        return max(standing, Standing.VICTIM)
    return max(standing, Standing.ABORTED) if status in ABORTS else standing


def _ended(word: LastWord) -> float:
    """Returns when a rank ended; before all others if unknown."""
    return -math.inf if word.ended is None else word.ended


def _number(rank: int | None) -> float:
    return math.inf if rank is None else rank
