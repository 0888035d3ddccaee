"""The verdict on a failed attempt is the same in any order of its facts, and without any that others imply."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from hpctrain.errors import Code, ExitCode
from hpctrain.launch.launcher_messages import deaths
from hpctrain.launch.postmortem import with_endings
from hpctrain.programs.plain_command import ending
from hpctrain.run.decision import blame
from hpctrain.run.first_cause import Death, Fact, Found, Standing, first_cause
from hpctrain.run.last_words import Ending, ErrorWord, LastWord
from hpctrain.run.verdict import failed_with


def running(rank: int, host: str = "n1") -> LastWord:
    return LastWord(rank, host, 100 + rank, 1.0, 0.0)


def failed(rank: int, what: str, ended: float, host: str = "n1", code: ExitCode = ExitCode.FAILURE) -> LastWord:
    error = ErrorWord(what, "", "RuntimeError", "", Code.EXCEPTION)
    return dataclasses.replace(running(rank, host), ending=Ending.FAILED, ended=ended, exit_code=int(code), error=error)


def program(rank: int, code: int, ended: float, said: str = "") -> LastWord:
    """The note of a plain command."""
    return dataclasses.replace(ending(running(rank), "python", code, False, said), ended=ended)


def noted(rank: int, code: int, at: float, standing: Standing = Standing.NOTED) -> Death:
    number, exit_code = (-code, None) if code < 0 else (None, code)
    return Death(rank, signal=number, exit_code=exit_code, standing=standing, at=at)


def swept(rank: int, code: int, at: float) -> Death:
    """Noted as others of its node died too."""
    return noted(rank, code, at, Standing.SWEPT)


def gone(*ranks: int) -> list[Death]:
    """What the monitor tells."""
    return [Death(rank, standing=Standing.GONE) for rank in ranks]


def found(standing: Standing, code: Code) -> Found:
    return Found(standing, failed_with(code, standing.name, ""))


@dataclass(frozen=True)
class Case:
    """One failure."""

    cause: int | Standing
    """The rank that explains it, or what does."""
    how: str
    """In the sentence."""
    needed: Sequence[Fact]
    """The facts that nothing else implies."""
    others: Sequence[Fact]


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4711"
WAITED = "rank 0 of 2 waited 60 s for the other ranks to begin"
OVER_TCP = " [n1:00000] *** An error occurred in Socket closed\n[n1:00000] *** reported by process [1962803201,0]\n"
SIGNALLED = "prterun noticed that process rank {} with PID {} on node {} exited on\nsignal {} (X).\n"
SRUN = (
    "srun: error: n1: task 1: Killed\n"
    "srun: error: n2: task 3: Segmentation fault\n"
    "srun: launch/slurm: _step_signal: Terminating StepId=57.1\n"
    "srun: error: n2: task 2: Killed\n"
)
ENDING = "srun: launch/slurm: _step_signal: Terminating StepId=56.1\n"
SRUN_AFTER = f"srun: error: n2: tasks 2-3: Killed\n{ENDING}srun: error: n1: task 1: Killed\n"
SRUN_OUT_OF_ORDER = (
    f"srun: error: n1: task 0: Exited with exit code 14\n{ENDING}"
    "srun: error: n2: task 3: Killed\nsrun: error: n1: task 1: Killed\nsrun: error: n2: task 2: Killed\n"
)
SRUN_ABORTED = f"srun: error: n2: task 3: Aborted\n{ENDING}srun: error: n1: task 1: Killed\n"
SRUN_OUT_OF_MEMORY = (
    f"srun: error: n1: task 1: Exited with exit code 14\n{ENDING}"
    "srun: error: n1: task 0: Killed\nsrun: error: n2: task 3: Out Of Memory\n"
)

CASES = {
    "a program's rank that leaves with 0, and one that then loses it": Case(
        1, "ended with exit code 0 before the others", [program(1, 0, 10.0), program(0, 1, 10.5, GLOO)], []
    ),
    "a program's rank that leaves with 75, and two that then lose it": Case(
        2,
        "ended with exit code 75 before the others",
        [program(2, 75, 10.0), program(0, 1, 10.5, GLOO), program(1, -6, 10.6)],
        [],
    ),
    "a program's error after another rank has left": Case(
        0, "ValueError: no", [program(1, 0, 10.0), program(0, 1, 10.5, "ValueError: no")], []
    ),
    "a killed program, and others that lose their connection or abort": Case(
        2, "SIGKILL", [program(2, -9, 1.2)], [program(0, -6, 1.1), program(1, 1, 1.0, GLOO), running(3)]
    ),
    "a death that is noted later than the complaints about it": Case(
        1,
        "SIGKILL",
        [running(1), noted(1, -9, 1.002)],
        [failed(0, GLOO, 1.0), noted(0, 70, 1.5), *gone(1), running(2, "n2")],
    ),
    "a death over TCP, whose victim is noted by a clock that is ahead": Case(
        1,
        "SIGKILL",
        [running(1, "n2"), noted(1, -9, 1.2)],
        [running(0), noted(0, 14, 1.0), *deaths(OVER_TCP), *gone(0, 1)],
    ),
    "an abort that follows a death elsewhere, and is noted before": Case(
        1, "SIGKILL", [running(1, "n2"), noted(1, -9, 1.2)], [running(0), noted(0, -6, 1.0), *gone(0, 1)]
    ),
    "a death that mpirun tells, on a node that noted only a victim": Case(
        1,
        "SIGKILL",
        [running(1), *deaths(SIGNALLED.format(1, 101, "n1", 9))],
        [running(0), noted(0, 14, 1.0), *gone(0), failed(2, GLOO, 1.1, "n2")],
    ),
    "one that srun reports among those that it kills": Case(
        3,
        "SIGSEGV",
        [running(3, "n2"), *(each for each in deaths(SRUN) if each.rank == 3)],
        [running(1), running(2, "n2"), *(each for each in deaths(SRUN) if each.rank != 3)],
    ),
    "one that srun may have killed, if others only complain": Case(
        1, "SIGKILL", [running(1, "n2"), *deaths("srun: error: n2: task 1: Killed\n")], [failed(0, GLOO, 1.0)]
    ),
    "a kill on a node whose agent was killed too, and another node's agent that noted how its ranks were": Case(
        2,
        "SIGKILL",
        [running(2, "n2"), deaths(SRUN_AFTER)[0]],
        [running(1), swept(1, -9, 1.0), swept(0, 14, 1.1), deaths(SRUN_AFTER)[2]],
    ),
    "a kill that srun reports among its own, all of which come after a victim": Case(
        3,
        "SIGKILL",
        [running(3, "n2"), deaths(SRUN_OUT_OF_ORDER)[1]],
        [running(1), swept(1, -9, 1.0), *deaths(SRUN_OUT_OF_ORDER)[::2]],
    ),
    "a kill that is noted late but alone, after another node's ranks were noted together": Case(
        3,
        "SIGKILL",
        [running(3, "n2"), noted(3, -9, 1.5)],
        [running(1), swept(1, -9, 1.0), *deaths(SRUN_AFTER)[1:]],
    ),
    "a kill that is noted together with those who lost their peer": Case(
        1, "SIGKILL", [running(1), swept(1, -9, 1.0)], [running(0), swept(0, 14, 1.1), swept(2, -15, 1.2)]
    ),
    "an abort, for which srun kills the ranks of another node": Case(
        3,
        "SIGABRT",
        [running(3, "n2"), deaths(SRUN_ABORTED)[0]],
        [running(1), swept(1, -9, 1.1), deaths(SRUN_ABORTED)[1], noted(3, -6, 1.0)],
    ),
    "a rank without memory, reported after a victim and one that srun kills": Case(
        3,
        "out of memory",
        [running(3, "n2"), deaths(SRUN_OUT_OF_MEMORY)[2]],
        [running(0), running(1), *deaths(SRUN_OUT_OF_MEMORY)[:2]],
    ),
    "a host that is cut off, for which srun kills the others": Case(
        Standing.CUT_OFF,
        "CUT_OFF",
        [found(Standing.CUT_OFF, Code.VANISHED), running(3, "n2")],
        [running(1), swept(1, -9, 1.1), deaths(SRUN_ABORTED)[1]],
    ),
    "a rank that leaves with 0, noted together with one that srun kills": Case(
        1,
        "exited during the run",
        [running(1), swept(1, 0, 1.1)],
        [running(0), swept(0, -9, 1.0), running(2, "n2"), deaths(SRUN_AFTER)[0]],
    ),
    "a rank that leaves with 0, as srun reports all but that one": Case(
        1,
        "exited during the run",
        [running(1), Death(1, exit_code=0, standing=Standing.LEFT)],
        [running(0), *deaths("srun: error: n1: task 0: Killed\n"), running(2, "n2"), deaths(SRUN_AFTER)[0]],
    ),
    "a crash, noted together with a kill": Case(
        1, "SIGSEGV", [running(1), swept(1, -11, 1.1)], [running(0), swept(0, -9, 1.0)]
    ),
    "a rank that leaves in mid-run with exit code 0": Case(
        1,
        "exited during the run",
        [running(1), noted(1, 0, 1.0)],
        [
            *(running(0), running(2, "n2"), noted(0, -9, 1.1), noted(2, -9, 1.2)),
            *deaths("srun: error: n2: task 2: Killed\n"),
        ],
    ),
    "an error, after which its launcher ends the others": Case(
        1,
        "the data is bad",
        [failed(1, "the data is bad", 5.0)],
        [running(0), running(2, "n2"), noted(0, -15, 5.01), noted(2, -9, 6.0), *gone(0), failed(3, GLOO, 4.9, "n2")],
    ),
    "a mistake in the run file, and a kill by a clock that is behind": Case(
        0,
        "no such key",
        [failed(0, "no such key", 5.0, code=ExitCode.USER_ERROR)],
        [running(1, "n2"), noted(1, -9, 4.8), *gone(1), found(Standing.NODE, Code.NODE), failed(2, GLOO, 4.9)],
    ),
    "a launcher that is killed": Case(
        Standing.LAUNCHER,
        "LAUNCHER",
        [found(Standing.LAUNCHER, Code.KILLED)],
        [failed(0, GLOO, 1.0), running(1), noted(1, -9, 0.9), *gone(1), program(2, -6, 1.1)],
    ),
    "a lost node, of which the launcher says nothing": Case(
        Standing.CUT_OFF,
        "CUT_OFF",
        [found(Standing.CUT_OFF, Code.VANISHED), running(1, "n2")],
        [failed(0, GLOO, 2.0), running(2), noted(2, 14, 1.9), *deaths(OVER_TCP)],
    ),
    "a lost node, after which ranks fail in their own words": Case(
        Standing.NODE,
        "NODE",
        [found(Standing.NODE, Code.NODE)],
        [
            failed(0, "OSError: stale", 2.0),
            running(1, "n2"),
            running(2),
            noted(2, -9, 1.9),
            found(Standing.CUT_OFF, Code.VANISHED),
        ],
    ),
    "ranks that the monitor ended, as they hung": Case(
        Standing.HUNG,
        "HUNG",
        [found(Standing.HUNG, Code.HANG)],
        [running(0), running(1), noted(0, -9, 9.0), noted(1, -9, 9.1), failed(2, WAITED, 9.2), *gone(0)],
    ),
    "a rank that died before it could speak": Case(
        1,
        "SIGSEGV",
        [*deaths(SIGNALLED.format(1, 101, "n1", 11))],
        [failed(0, WAITED, 60.0), running(2), noted(2, 14, 60.1)],
    ),
    "a process that the supervisor misses, and a launcher that does nothing": Case(
        Standing.SEEN,
        "SEEN",
        [found(Standing.SEEN, Code.KILLED)],
        [failed(0, GLOO, 1.0), running(1), *gone(1), running(2), noted(2, 14, 1.2)],
    ),
}


def verdict(facts: Sequence[Fact]) -> tuple[int | Standing | None, str]:
    """Which rank, or what, and the words for it, after the words of ranks were completed by it too."""
    words = sorted((fact for fact in facts if isinstance(fact, LastWord)), key=lambda word: word.rank or 0)
    cause = first_cause(facts)
    if isinstance(cause, Found):
        return cause.standing, cause.verdict.reason
    said = blame(with_endings(words, cause))
    if isinstance(cause, Death) and cause.rank not in {word.rank for word in words}:
        return cause.rank, cause.cause
    assert cause is not None and said.rank == cause.rank, "what is written down has the same cause"
    return said.rank, said.reason


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cause_is_the_same_in_every_order_and_if_any_fact_that_others_imply_is_missing(case):
    facts = [*case.needed, *case.others]
    rank, words = verdict(facts)
    assert rank == case.cause and case.how in words
    missing = [[fact for fact in facts if fact is not left] for left in (None, *case.others)]
    told = {verdict(order) for some in missing for order in itertools.permutations(some)}
    assert told == {(rank, words)}


def test_of_what_is_equally_well_known_the_lowest_rank_is_the_cause():
    for first, second in itertools.permutations([failed(1, "boom", 1.0), failed(2, "bang", 1.0)]):
        assert first_cause([first, second]) == failed(1, "boom", 1.0)
    unknown = dataclasses.replace(failed(0, "bad", 1.0), rank=None)
    assert first_cause([unknown, failed(1, "boom", 1.0)]) == failed(1, "boom", 1.0)


def test_what_several_sources_tell_of_one_death_is_one_fact():
    told = [noted(0, 0, 1.0), Death(0, exit_code=3), Death(0, standing=Standing.GONE)]
    for order in itertools.permutations(told):
        assert first_cause([running(0), *order]) == Death(0, exit_code=3, standing=Standing.NOTED, at=1.0)


def test_of_a_death_and_an_error_at_the_same_moment_the_error_is_the_cause():
    error = failed(0, "ValueError: x", 1.0)
    assert first_cause([error, running(1), noted(1, -9, 1.0)]) == error


@pytest.mark.parametrize(("noted_at", "rank"), [(6.5, 1), (10.0, 0)])
def test_a_death_long_after_an_error_about_a_connection_did_not_cause_it(noted_at, rank):
    """The failed rank aborted the others: a server of data had refused it, no rank."""
    complaint = failed(0, "ConnectionRefusedError: [Errno 111] Connection refused", 6.0)
    facts = [complaint, running(1), noted(1, -9, noted_at)]
    cause = first_cause(facts)
    assert cause is not None and not isinstance(cause, Found) and cause.rank == rank
    elsewhere = [complaint, running(1, "n2"), noted(1, -9, noted_at)]  # whose clock may be ahead
    assert isinstance(first_cause(elsewhere), Death)


def test_a_full_device_is_no_lost_peer():
    full = failed(1, "NCCL error in: a.cpp\nCuda failure 2 'out of memory'", 6.0)
    assert full.error is not None
    error = dataclasses.replace(full.error, code=Code.OUT_OF_MEMORY)
    assert first_cause([dataclasses.replace(full, error=error), failed(0, "Connection closed by peer", 5.9)]).rank == 1  # type: ignore[union-attr]
