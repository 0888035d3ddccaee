"""What went wrong first in a failed attempt: one choice over all that is known, whatever became known first. Pure."""

from __future__ import annotations

import math
import re
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum, auto

from hpctrain.errors import Code, ExitCode
from hpctrain.run.last_words import Ending, LastWord
from hpctrain.run.verdict import RunVerdict
from hpctrain.system.signals import signal_name

FINAL = (ExitCode.USER_ERROR, ExitCode.DO_NOT_REQUEUE)
"""Exit codes of errors that every attempt would repeat."""
TOGETHER_S = 15.0
"""Seconds within which one rank's failure makes others fail: libraries give up when a connection closes."""
MPI_ERR_UNKNOWN = 14
"""Open MPI 4 and 5 leave with this number when their runtime tells them that another rank is lost."""
ABORTS = (128 + signal.SIGABRT, 128 + signal.SIGPIPE)
"""Exit codes of processes that give up by themselves, as Gloo and NCCL do if a peer is gone."""
ENDED_BY_OTHERS = (MPI_ERR_UNKNOWN, 128 + signal.SIGTERM)
"""Exit codes of processes that MPI or a launcher ended after another one."""
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|closed by peer|remote peer|lost peer"
    r"|remote process|DistNetworkError|DistStoreError|for the other ranks to|NCCL error|socket closed"
    r"|Horovod has been shut down|MPI_ERR_PROC_FAILED",
    re.IGNORECASE,
)
"""What errors say whose cause lies in another process."""


class Standing(IntEnum):
    """How well a fact explains the end of an attempt: the first of these that is known is the cause."""

    FINAL = auto()
    """A rank's own error that every attempt would repeat."""
    HUNG = auto()
    """The monitor ended ranks of which none moved."""
    ENDED = auto()
    """The supervisor ended the attempt."""
    NODE = auto()
    """The launcher lost a node, or could not start ranks there."""
    NOTED = auto()
    """A death before all others of its node, as noted there, and before any rank's own error."""
    REPORTED = auto()
    """A death that the launcher tells and did not cause."""
    SAID = auto()
    """A rank's own error."""
    LAUNCHER = auto()
    """Somebody killed the launcher; its ranks die with it."""
    KILLED = auto()
    """A death that the launcher tells and may have caused, or one of a rank that never spoke."""
    LEFT = auto()
    """The launcher tells the ends of all other ranks that said nothing: this one exited with 0."""
    CUT_OFF = auto()
    """The monitor could not reach a host, and its ranks have said nothing."""
    ABORTED = auto()
    """A rank gave up by itself, and did not say why."""
    SEEN = auto()
    """The supervisor found that a process was gone, and its launcher did nothing."""
    GONE = auto()
    """The monitor found that a process was gone."""
    VICTIM = auto()
    """Another rank's end ended this one."""
    COMPLAINED = auto()
    """A rank's error whose cause is in another process, or that came long after the first one."""
    LATER = auto()
    """A death after one that could have caused it."""


@dataclass(frozen=True)
class Death:
    """What one source reports on the end of one process."""

    rank: int | None = None
    pid: int | None = None
    host: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    out_of_memory: bool = False
    standing: Standing = Standing.REPORTED
    at: float | None = None
    """Unix seconds, if its host's agent noted it."""

    @property
    def cause(self) -> str:
        """For a sentence that begins with the rank: 'was killed by SIGKILL'."""
        if self.out_of_memory:
            return "was killed by the kernel: out of memory"
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}"
        if self.exit_code == MPI_ERR_UNKNOWN:
            return f"exited with code {self.exit_code}, as MPI does where another rank is lost"
        return f"exited with code {self.exit_code}" if self.exit_code else "left in mid-run without an error"

    @property
    def code(self) -> Code:
        """The same for programs. Shells and launchers give signals as exit codes from 129."""
        if self.out_of_memory:
            return Code.OUT_OF_MEMORY
        return Code.KILLED if (self.status or 0) > 128 else Code.VANISHED

    @property
    def status(self) -> int | None:
        """The exit code that a shell would show; None if that is not known."""
        return self.exit_code if self.signal is None else 128 + self.signal


@dataclass(frozen=True)
class Found:
    """What is known of the attempt as a whole."""

    standing: Standing
    verdict: RunVerdict


Fact = LastWord | Death | Found


def first_cause(facts: Collection[Fact]) -> Fact | None:
    """The fact that explains the others; None if no rank failed or died, as far as is known.

    What several sources report on one rank's death is one fact. What a rank said itself stands.
    """
    words = sorted((fact for fact in facts if isinstance(fact, LastWord)), key=lambda word: _number(word.rank))
    together = min((_ended(word) for word in words if word.ending is Ending.FAILED), default=0.0) + TOGETHER_S
    spoken = [(_of_word(word, together), word) for word in words if word.ending in (Ending.FAILED, Ending.KILLED)]
    first_error = min((_ended(word) for standing, word in spoken if standing is Standing.SAID), default=math.inf)
    whole = [fact for fact in facts if isinstance(fact, Found)]
    if any(fact.standing is Standing.LAUNCHER for fact in whole):
        first_error = -math.inf  # ranks die with it
    deaths = _of_deaths([fact for fact in facts if isinstance(fact, Death)], words, first_error)
    ranked: list[tuple[Standing, float, float, Fact]] = [
        *((fact.standing, 0.0, 0.0, fact) for fact in whole),
        *((standing, _ended(word), _number(word.rank), word) for standing, word in spoken),
        *((each.standing, math.inf if each.at is None else each.at, _number(each.rank), each) for each in deaths),
    ]
    return min(ranked, key=lambda each: each[:3])[3] if ranked else None


def is_victim(word: LastWord) -> bool:
    """Whether a rank ended as those do that lose a peer."""
    if _at_most(Standing.NOTED, word.exit_code) is not Standing.NOTED and (
        word.error is None or word.error.type == "exit"
    ):
        return True
    return word.error is not None and LOST_PEER.search(word.error.what) is not None


def _of_word(word: LastWord, together: float) -> Standing:
    """``together``: until when errors may come from the same cause, Unix seconds."""
    if word.ending is Ending.KILLED:
        return _at_most(Standing.REPORTED, word.exit_code)
    if word.exit_code in FINAL:
        return Standing.FINAL
    return Standing.COMPLAINED if is_victim(word) or _ended(word) > together else Standing.SAID


def _of_deaths(told: Iterable[Death], words: Iterable[LastWord], first_error: float) -> list[Death]:
    """One death for each rank that did not say how it ended, with its standing among the others."""
    of_rank, by_pid = {word.rank: word for word in words}, {word.pid: word.rank for word in words}
    known: dict[int, list[Death]] = defaultdict(list)
    for death in told:
        rank = by_pid.get(death.pid or 0) if death.rank is None else death.rank
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
        standing = _at_most(_of_rank(each, at, at == earliest.get(hosts[rank]), first_error), how.status)
        standing = standing if rank in of_rank else max(standing, Standing.KILLED)
        found.append(Death(rank, None, None, how.signal, how.exit_code, how.out_of_memory, standing, at))
    return found


def _of_rank(each: Iterable[Death], at: float | None, is_first: bool, first_error: float) -> Standing:
    """Before its exit code is looked at. ``is_first``: no other death was noted on its node before.

    The order of what one node notes is right; that of what a launcher tells is not.
    """
    told = {one.standing for one in each}
    standing = min(told)
    if at is not None and at >= first_error:
        standing = Standing.LATER
    elif not is_first and (at is not None or standing is Standing.KILLED):
        standing = Standing.REPORTED if Standing.REPORTED in told else Standing.LATER
    return max(standing, Standing.VICTIM) if Standing.VICTIM in told else standing


def _at_most(standing: Standing, status: int | None) -> Standing:
    """Lowered if the exit code is one of those that another rank's end may give."""
    if status in ENDED_BY_OTHERS:
        return max(standing, Standing.VICTIM)
    return max(standing, Standing.ABORTED) if status in ABORTS else standing


def _ended(word: LastWord) -> float:
    """Before all others if it is not known when."""
    return -math.inf if word.ended is None else word.ended


def _number(rank: int | None) -> float:
    return math.inf if rank is None else rank
