"""Who died first, from what agents noted."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest

from hpctrain.errors import Code, ExitCode
from hpctrain.launch.launcher_messages import Death, bereaved, reported
from hpctrain.launch.postmortem import (
    all_ended_well,
    complete,
    died_first,
    first_deaths,
    hang,
    last_line,
    missing_ranks,
    ran_out_of_memory,
)
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, LastWord, NotedDeath, note_death, noted_deaths
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR


def test_the_first_death_is_the_cause_unless_an_error_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv(ATTEMPT, "2")
    assert died_first(run, 2) == []
    note_death(3)
    note_death(1)
    assert died_first(run, 2) == [3]
    assert died_first(run, 1) == [], "another attempt's"
    text = "srun: error: n2: task 3: Exited with exit code 14\nsrun: error: n1: tasks 0-1: Killed\n"
    far = [LastWord(rank, host, 1, 0.0, 0.0) for rank, host in enumerate(("n1", "n1", "n2", "n2"))]
    near = [LastWord(rank, "n1", 1, 0.0, 0.0) for rank in range(4)]
    assert died_first(run, 2, far, bereaved(text)) == [1], "MPI ended rank 3 after it"
    assert died_first(run, 2, near, bereaved(text)) == [3], "it left by that number itself: one node's order is right"
    assert died_first(run, 2, far, [1, 3]) == [3], "somebody was the first"
    gone = [{"rank": rank, "host": "n1", "steps": 8, "state": "gone", "doing": "", "stack": None} for rank in (0, 1)]
    died = {"event": "hang", "schema": 1, "time": 2.0, "step": 8, "attempt": 2, "kind": "died", "silence_s": 0.2}
    line = json.dumps({**died, "ranks": gone, "healthy": [], "waiting": 2, "action": "abort", "sentence": ""})
    run.monitor_events.write_text(f"{line}\n")
    assert died_first(run, 2) == [3], "what the first node heard of when it told of deaths is not the order"
    assert died_first(run, 2, far, [1, 3]) == [0], "not noted, as its node ended with it"
    run.monitor_events.unlink()
    before = LastWord(0, "n1", 1, 0.0, 0.0, ending=Ending.FAILED, ended=1.0)
    assert died_first(run, 2, [before]) == []


@pytest.mark.parametrize(
    ("sentence", "told"), [("no step for 130 s: rank 1", "no step for 130 s: rank 1"), ("", "no rank moved any more")]
)
def test_a_hang_that_the_monitor_ended_is_told_in_its_words(tmp_path: Path, sentence: str, told: str) -> None:
    run = RunDir(tmp_path)
    run.create()
    rank = {"rank": 1, "host": "n1", "steps": 8, "state": "running", "doing": "", "stack": None}
    hung = {"event": "hang", "schema": 1, "time": 2.0, "step": 8, "attempt": 2, "kind": "hung", "silence_s": 130.0}
    line = {**hung, "ranks": [rank], "healthy": [], "waiting": 1, "action": "abort", "sentence": sentence}
    run.monitor.mkdir(exist_ok=True)
    run.monitor_events.write_text(f"{json.dumps(line)}\n")
    verdict = hang(run, 2)
    assert verdict is not None
    assert (verdict.code, verdict.reason, verdict.rank) == (Code.HANG, told, 1)


def test_of_several_ranks_of_other_nodes_the_first_one_noted_died_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    (run.monitor / "deaths-1.txt").write_text("1.0 3\n2.0 1\n3.0 0\n")
    words = [LastWord(rank, host, 1, 0.0, 0.0) for rank, host in enumerate(("n1", "n1", "n2", "n2"))]
    assert died_first(run, 1, words, bereaved=[3]) == [1], "MPI ended rank 3, and rank 0 died after rank 1"


BEREAVED = """\
srun: error: n1: task 1: Killed
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=57.1
srun: error: n2: task 2: Killed
srun: error: n1: task 0: Exited with exit code 14
"""


@pytest.mark.parametrize(
    ("noted", "first"),
    [
        ("1.0 0\n2.0 1\n", [3]),  # n2's agent was ended before it could note
        ("1.0 0\n1.5 2\n2.0 1\n", [2]),  # it noted, and one node's order is right
        ("", []),
    ],
)
def test_the_launcher_tells_who_died_on_a_node_whose_agent_could_not_note(
    tmp_path: Path, noted: str, first: list[int]
) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    (run.monitor / "deaths-1.txt").write_text(noted)
    words = [LastWord(rank, host, 1, 0.0, 0.0) for rank, host in enumerate(("n1", "n1", "n2", "n2"))]
    assert died_first(run, 1, words, bereaved(BEREAVED), reported(BEREAVED)) == first
    of_one_node = [LastWord(rank, "n1", 1, 0.0, 0.0) for rank in range(4)]
    told = died_first(run, 1, of_one_node, bereaved(BEREAVED), reported(BEREAVED))
    assert told == ([0] if noted else []), "it left by that number itself"


OVER_TCP = """\
An MPI communication peer process has unexpectedly disconnected.  This
  Local host: n1
  Peer host:  n2
 [n1:00000] *** An error occurred in Socket closed
[n1:00000] *** reported by process [1962803201,0]
[n1:00000] *** on a NULL communicator
prterun has exited due to process rank 0 with PID 0 on node n1 calling
"abort". This may have caused other processes in the application to be
"""


@pytest.mark.parametrize("text", [OVER_TCP, ""])
@pytest.mark.parametrize("notes", ["1.0 1 -9\n1.2 0 14\n", "1.0 0 14\n1.2 1 -9\n"])
def test_who_leaves_as_a_connection_ends_is_never_the_cause(tmp_path: Path, notes: str, text: str) -> None:
    """mpirun then tells of the victim only, and the victim's note may come first."""
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    (run.monitor / "deaths-1.txt").write_text(notes)
    words = [LastWord(rank, host, 1, 0.0, 0.0) for rank, host in enumerate(("n1", "n2"))]
    [death] = first_deaths(run, 1, words, text, "")
    assert (death.rank, death.signal) == (1, 9)


def test_a_note_that_comes_later_than_its_victim_s_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv(ATTEMPT, "1")
    note_death(0, 14)
    words = [LastWord(rank, host, 1, 0.0, 0.0) for rank, host in enumerate(("n1", "n2"))]
    monkeypatch.setattr("hpctrain.launch.postmortem.time.sleep", lambda seconds: note_death(1, -11))
    [death] = first_deaths(run, 1, words, OVER_TCP, "")
    assert (death.rank, death.cause) == (1, "was killed by SIGSEGV")


def test_a_victim_is_named_if_nothing_else_is_ever_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    (run.monitor / "deaths-1.txt").write_text("1.0 0 14\n")
    monkeypatch.setattr("hpctrain.launch.postmortem.LATE_NOTE_S", 0.0)
    [death] = first_deaths(run, 1, [LastWord(0, "n1", 1, 0.0, 0.0)], OVER_TCP, "")
    assert (death.rank, death.exit_code) == (0, 14)


def test_victims_that_the_monitor_saw_are_not_the_cause_though_no_agent_noted_a_death(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    victims = [{"rank": rank, "host": "n1", "state": "gone"} for rank in (0, 1)]
    died = {"time": 1.0, "event": "hang", "step": 18, "attempt": 1, "kind": "died", "ranks": victims, "action": "abort"}
    run.monitor_events.write_text(json.dumps(died) + "\n")
    said = "srun: error: n2: tasks 2-3: Killed\nsrun: error: n1: tasks 0-1: Exited with exit code 14\n"
    words = [LastWord(rank, host, 1, 0.0, 0.0) for rank, host in enumerate(("n1", "n1", "n2", "n2"))]
    assert died_first(run, 1, words, bereaved(said), reported(said)) == [2], "one of n2, whichever it was"


def test_what_was_found_out_of_a_rank_is_in_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    running = LastWord(1, socket.gethostname(), 7, 0.0, 0.0)
    killed = complete(running, [Death(1, signal=9)], [running])
    assert (killed.ending, killed.code, killed.exit_code) == (Ending.KILLED, Code.KILLED, 137)
    monkeypatch.setattr("hpctrain.launch.postmortem.ran_out_of_memory", lambda word: True)
    assert complete(running, [Death(1, signal=9)], [running]).code is Code.OUT_OF_MEMORY
    assert complete(running, [Death(1, signal=11)], [running]).code is Code.KILLED
    elsewhere = dataclasses.replace(running, host="n9")
    assert complete(elsewhere, [Death(1, signal=9)], [running]).code is Code.KILLED, "its kernel cannot be asked"


SRUN = """\
srun: error: task 2 launch failed: Unspecified error
srun: error: task 3 launch failed: Unspecified error
srun: error: n1: tasks 0-1: Killed
"""


@pytest.mark.parametrize(("hosts", "host", "where"), [({2: "n2"}, "n2", " on n2"), ({}, None, "")])
def test_ranks_that_slurm_could_not_start_are_the_nodes_fault(
    tmp_path: Path, hosts: dict[int, str], host: str | None, where: str
) -> None:
    verdict = missing_ranks([], 4, SRUN, "", tmp_path / "log", hosts)
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.code) == (2, host, Code.NODE)
    assert verdict.reason == f"rank 2 could not be started{where}: Slurm says 'Unspecified error'"
    assert (f"leave the host out (--exclude {host})" in verdict.fix) is (host is not None)


@pytest.mark.parametrize(
    ("heard", "silent", "told"), [("tasks 0-1", 2, "heard from ranks 2, 3"), ("tasks 0-2", 3, "heard from rank 3")]
)
def test_a_lost_node_is_the_cause_of_what_other_ranks_report(
    tmp_path: Path, heard: str, silent: int, told: str
) -> None:
    text = f"srun: error: n1: {heard}: Killed\nsrun: error: Timed out waiting for job step to complete\n"
    words = [LastWord(rank, host, 1, 0.0, 0.0) for rank, host in enumerate(("n1", "n1", "n2", "n2"))]
    words[0] = dataclasses.replace(words[0], ending=Ending.FAILED, exit_code=ExitCode.FAILURE)
    mistake = dataclasses.replace(words[0], exit_code=ExitCode.USER_ERROR)
    assert missing_ranks([mistake, *words[1:]], 4, text, "", tmp_path / "log", {}) is None, "the run's own"
    verdict = missing_ranks(words, 4, text, "", tmp_path / "log", {})
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.code) == (silent, "n2", Code.NODE)
    assert "n2 was lost" in verdict.reason and verdict.reason.endswith(told)


def test_of_many_ranks_of_lost_nodes_the_first_eight_are_named_with_the_host_of_the_first(tmp_path: Path) -> None:
    """Those that told their end themselves are not lost."""
    text = "srun: error: Timed out waiting for job step to complete\n"
    lost = [LastWord(rank, "n2" if rank < 5 else "n3", 1, 0.0, 0.0) for rank in range(1, 11)]
    verdict = missing_ranks([LastWord(0, "n1", 1, 0.0, 0.0, ended=1.0), *lost], 11, text, "", tmp_path / "log", {})
    assert verdict is not None and (verdict.rank, verdict.host) == (1, "n2")
    assert verdict.reason.endswith("heard from ranks 1, 2, 3, 4, 5, 6, 7, 8")


@pytest.mark.parametrize(
    ("named", "host", "reason"),
    [
        ("  Remote daemon: [prterun-n1-1@0,1] on node n2\n", "n2", "n2 was lost, or the launcher's daemon on it"),
        ("", None, "a node was lost: PRTE has lost communication with a remote daemon."),
    ],
)
def test_a_lost_node_is_named_if_the_launcher_names_it(
    tmp_path: Path, named: str, host: str | None, reason: str
) -> None:
    text = f"PRTE has lost communication with a remote daemon.\n{named}"
    verdict = missing_ranks([], 2, text, "", tmp_path / "log", {})
    assert verdict is not None and (verdict.host, verdict.reason) == (host, reason)


def test_the_runs_own_mistake_is_not_hidden_by_a_lost_node(tmp_path: Path) -> None:
    failed = LastWord(0, "n1", 1, 0.0, 0.0, ending=Ending.FAILED, ended=1.0, exit_code=ExitCode.USER_ERROR)
    text = "PRTE has lost communication with a remote daemon.\n"
    assert missing_ranks([failed], 2, text, "", tmp_path / "log", {}) is None
    lost = missing_ranks([], 2, text, "", tmp_path / "log", {})
    assert lost is not None and lost.code is Code.NODE


def test_a_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    (run.monitor / "deaths-1.txt").write_text("12.5 4 -9\n11.0 2 \n13.")
    assert noted_deaths(run, 1) == [NotedDeath(11.0, 2), NotedDeath(12.5, 4, -9)]


RUNNING = LastWord(1, socket.gethostname(), 7, 0.0, 0.0)
FAILED = dataclasses.replace(RUNNING, rank=0, pid=6, ending=Ending.FAILED, ended=1.0)


def test_what_a_rank_said_itself_stands() -> None:
    assert complete(FAILED, [Death(0, signal=9)], [FAILED]) is FAILED


def test_a_rank_without_a_death_was_taken_down_if_anybody_failed_or_died() -> None:
    assert complete(RUNNING, [], [RUNNING]).ending is Ending.VANISHED
    assert complete(RUNNING, [], [FAILED, RUNNING]).ending is Ending.TAKEN_DOWN
    assert complete(RUNNING, [Death(0, signal=9)], [RUNNING]).ending is Ending.TAKEN_DOWN


def test_a_death_without_a_rank_is_that_of_its_process() -> None:
    assert complete(RUNNING, [Death(None, pid=7, signal=11)], [RUNNING]).exit_code == 128 + 11
    assert complete(RUNNING, [Death(None, pid=8, signal=11)], [RUNNING]).ending is Ending.TAKEN_DOWN
    assert complete(RUNNING, [Death(0, pid=7, signal=11)], [RUNNING]).ending is Ending.TAKEN_DOWN
    assert complete(RUNNING, [Death(1, exit_code=3)], [RUNNING]).exit_code == 3


@pytest.mark.parametrize(
    ("before", "now", "ran_out"), [(1, 2, True), (1, 1, False), (None, 2, False), (1, None, False)]
)
def test_one_more_kill_of_the_control_group_is_this_rank_s(
    monkeypatch: pytest.MonkeyPatch, before: int | None, now: int | None, ran_out: bool
) -> None:
    monkeypatch.setattr("hpctrain.system.processes.kernel_killed_for_memory", lambda pid: False)
    monkeypatch.setattr("hpctrain.system.cgroups.oom_kills", lambda: now)
    assert ran_out_of_memory(dataclasses.replace(RUNNING, oom_kills=before)) is ran_out


def test_the_last_line_says_something() -> None:
    assert last_line("first\n  second  \n-----\n\t=== \n\n") == "second"
    assert last_line("") == "" and last_line("x" * 400) == "x" * 300


def test_ranks_have_ended_well_if_all_of_them_say_so() -> None:
    good = dataclasses.replace(RUNNING, ending=Ending.COMPLETED)
    assert all_ended_well([good, good], 2)
    assert not all_ended_well([good], 2) and not all_ended_well([good, FAILED], 2)


def test_ranks_that_never_spoke_are_counted_and_the_launcher_quoted(tmp_path: Path) -> None:
    quoted = missing_ranks([], 2, "something went wrong\n", "", tmp_path / "log", {})
    assert quoted is not None
    assert quoted.reason == "2 of 2 ranks ended before they could say why: something went wrong"
    assert (quoted.code, quoted.rank) == (Code.VANISHED, None) and quoted.fix == f"see {tmp_path / 'log'}"
    spoken = [dataclasses.replace(RUNNING, rank=0, ended=1.0, ending=Ending.COMPLETED)]
    silent = missing_ranks(spoken, 2, "", "", tmp_path / "log", {})
    assert silent is not None
    assert silent.reason == "1 of 2 ranks ended before they could say why: nothing was said"
    assert missing_ranks(spoken, 1, "", "", tmp_path / "log", {}) is None, "all have spoken"
    assert missing_ranks([FAILED], 2, "", "", tmp_path / "log", {}) is None, "one said what is wrong"
