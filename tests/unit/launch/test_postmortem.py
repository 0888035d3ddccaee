"""Who died first, from what agents noted."""

from __future__ import annotations

import dataclasses
import json
import resource
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.errors import Code
from hpctrain.launch import postmortem
from hpctrain.launch.postmortem import (
    all_ended_well,
    facts_of,
    last_line,
    lost_node,
    missing_ranks,
    settled,
    startup_error,
    with_endings,
)
from hpctrain.run import last_words
from hpctrain.run.decision import starts_again
from hpctrain.run.events import CUT_OFF
from hpctrain.run.first_cause import Death, Fact, Found, Standing, first_cause
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, ErrorWord, LastWord, NotedDeath, note_death, noted_deaths
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.run.verdict import Action
from hpctrain.system import processes


def running(*hosts: str) -> list[LastWord]:
    """Words of ranks on these hosts."""
    return [LastWord(rank, host, 100 + rank, 0.0, 0.0) for rank, host in enumerate(hosts)]


FAR, NEAR = running("n1", "n1", "n2", "n2"), running("n1", "n1", "n1", "n1")


def cause(run: RunDir, words: list[LastWord], text: str = "", attempt: int = 1) -> Fact | None:
    """By what is known now."""
    return first_cause(facts_of(run, attempt, words, text, ""))


def first(run: RunDir, words: list[LastWord], text: str = "", attempt: int = 1) -> int | None:
    """The rank that died first."""
    found = cause(run, words, text, attempt)
    return found.rank if isinstance(found, Death) else None


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An empty run folder."""
    made = RunDir(tmp_path)
    made.create()
    made.monitor.mkdir(exist_ok=True)
    return made


def tell(run: RunDir, kind: str, ranks: list[int], action: str = "abort", sentence: str = "", attempt: int = 1) -> None:
    """What the monitor tells."""
    about = [{"rank": rank, "host": "n1", "steps": 8, "state": "gone", "doing": "", "stack": None} for rank in ranks]
    line = {"event": "hang", "schema": 1, "time": 2.0, "step": 8, "attempt": attempt, "kind": kind, "silence_s": 0.2}
    line |= {"ranks": about, "healthy": [], "waiting": 2, "action": action, "sentence": sentence}
    with run.monitor_events.open("a") as file:
        file.write(f"{json.dumps(line)}\n")


def test_the_first_death_is_the_cause_unless_an_error_came_before(run, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(run.path))
    monkeypatch.setenv(ATTEMPT, "2")
    assert first(run, NEAR, attempt=2) is None
    note_death(3)
    note_death(1)
    assert first(run, NEAR, attempt=2) == 3
    assert first(run, NEAR, attempt=1) is None, "another attempt's"
    text = "srun: error: n2: task 3: Exited with exit code 14\nsrun: error: n1: tasks 0-2: Killed\n"
    assert first(run, FAR, text, 2) == 1, "MPI ended rank 3 after it"
    assert first(run, NEAR, text, 2) == 3, "it left by that number itself: one node's order is right"
    closed = " [n1:00000] *** An error occurred in Socket closed\n[n1:00000] *** reported by process [7,{}]\n"
    victims = closed.format(1) + closed.format(3)
    assert first(run, FAR, victims, 2) == 3, "somebody was the first"
    tell(run, "died", [0, 1], attempt=2)
    assert first(run, NEAR, attempt=2) == 3, "what the first node heard of when it told of deaths is not the order"
    assert first(run, FAR, victims, 2) == 0, "not noted, as its node ended with it"
    before = dataclasses.replace(FAR[0], ending=Ending.FAILED, ended=1.0)
    assert cause(run, [before, *FAR[1:]], attempt=2) is before


@pytest.mark.parametrize(
    ("sentence", "told"), [("no step for 130 s: rank 1", "no step for 130 s: rank 1"), ("", "no rank made progress")]
)
def test_a_hang_that_the_monitor_ended_is_told_in_its_words(run, sentence, told):
    tell(run, "hung", [1], "abort", sentence)
    found = cause(run, FAR)
    assert isinstance(found, Found)
    assert (found.verdict.code, found.verdict.reason, found.verdict.rank) == (Code.HANG, told, 1)


def test_a_host_that_the_monitor_could_not_reach_is_the_cause_if_its_ranks_stay_silent(run):
    tell(run, "hung", [1], "report")
    tell(run, CUT_OFF, [2, 3], "report")
    found = cause(run, FAR)
    assert isinstance(found, Found)
    told = found.verdict.code, found.verdict.host, found.verdict.rank
    assert told == (Code.VANISHED, "n2", 2), "no reason to leave the host out"
    back = dataclasses.replace(FAR[3], ending=Ending.TAKEN_DOWN, ended=3.0)
    assert cause(run, [*FAR[:3], back]) is None, "it has been heard of since"


def test_of_several_ranks_of_other_nodes_the_first_one_noted_died_first(run):
    (run.monitor / "deaths-1-n1.txt").write_text("1.0 3 14\n2.0 1\n3.0 0\n")
    assert first(run, FAR) == 1, "MPI ended rank 3, and rank 0 died after rank 1"


def test_the_first_one_is_found_if_the_clocks_of_nodes_differ(run, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(run.path))
    monkeypatch.setenv(ATTEMPT, "1")
    for rank, moment, ahead in ((3, 1020.0, 20.0), (0, 1000.5, 0.0)):  # that of n2 is 20 seconds ahead
        monkeypatch.setenv(last_words.AHEAD_S, str(ahead))
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        note_death(rank, -9)
    assert first(run, FAR) == 3


BEREAVED = """\
srun: error: n1: task 1: Killed
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=57.1
srun: error: n2: task 2: Killed
srun: error: n1: task 0: Exited with exit code 14
"""


@pytest.mark.parametrize(
    ("noted", "dead"),
    [
        ("1.0 0\n2.0 1\n", 3),  # n2's agent was ended before it could note
        ("1.0 0\n1.5 2\n2.0 1\n", 2),  # it noted, and one node's order is right
        ("", 1),
    ],
)
def test_the_launcher_tells_who_died_on_a_node_whose_agent_could_not_note(run, noted, dead):
    (run.monitor / "deaths-1-n1.txt").write_text(noted)
    assert first(run, FAR, BEREAVED) == dead
    assert first(run, NEAR, BEREAVED) == (0 if noted else 1), "it left by that number itself"


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


def settles(run: RunDir, words: list[LastWord], text: str = "") -> Death:
    """The death that is found to be the cause in the end."""
    found = settled(lambda: facts_of(run, 1, words, text, ""))
    assert isinstance(found, Death)
    return found


@pytest.mark.parametrize("text", [OVER_TCP, ""])
@pytest.mark.parametrize("notes", ["1.0 1 -9\n1.2 0 14\n", "1.0 0 14\n1.2 1 -9\n"])
def test_who_leaves_as_a_connection_ends_is_never_the_cause(run, notes, text):
    """mpirun then tells of the victim only, and the victim's note may come first."""
    (run.monitor / "deaths-1-n1.txt").write_text(notes)
    death = settles(run, running("n1", "n2"), text)
    assert (death.rank, death.signal) == (1, 9)


@pytest.mark.parametrize("missed", [False, True])
def test_a_note_that_comes_later_than_its_victim_s_is_waited_for(run, monkeypatch, missed):
    monkeypatch.setenv(RUN_DIR, str(run.path))
    monkeypatch.setenv(ATTEMPT, "1")
    note_death(0, 14)
    if missed:
        tell(run, "died", [1])  # of what is not known yet
    monkeypatch.setattr("hpctrain.launch.postmortem.time.sleep", lambda seconds: note_death(1, -11))
    death = settles(run, running("n1", "n2"), OVER_TCP)
    assert (death.rank, death.cause) == (1, "was killed by SIGSEGV")


def test_a_note_that_explains_a_complaint_is_waited_for(run, monkeypatch):
    monkeypatch.setenv(RUN_DIR, str(run.path))
    monkeypatch.setenv(ATTEMPT, "1")
    error = ErrorWord("Connection closed by peer", "", "RuntimeError", "")
    words = running("n1", "n2")
    words[0] = dataclasses.replace(words[0], ending=Ending.FAILED, ended=1.0, error=error)
    monkeypatch.setattr("hpctrain.launch.postmortem.time.sleep", lambda seconds: note_death(1, -9))
    assert settles(run, words).rank == 1
    words[1] = dataclasses.replace(words[1], ending=Ending.TAKEN_DOWN, ended=1.0)
    assert settled(lambda: facts_of(run, 1, words, "", "")) is words[0], "all have spoken"


def test_a_victim_is_named_if_nothing_else_is_ever_heard_of(run, monkeypatch):
    (run.monitor / "deaths-1-n1.txt").write_text("1.0 0 14\n")
    monkeypatch.setattr("hpctrain.launch.postmortem.LATE_NOTE_S", 0.0)
    death = settles(run, running("n1", "n2"), OVER_TCP)
    assert (death.rank, death.exit_code) == (0, 14)


def test_victims_that_the_monitor_saw_are_not_the_cause_though_no_agent_noted_a_death(run):
    tell(run, "died", [0, 1])
    said = "srun: error: n2: tasks 2-3: Killed\nsrun: error: n1: tasks 0-1: Exited with exit code 14\n"
    assert first(run, FAR, said) == 2, "one of n2, whichever it was"


def test_what_was_found_out_of_a_rank_is_in_its_word(monkeypatch):
    monkeypatch.setattr("hpctrain.system.processes.ran_out_of_memory", lambda pid, born, before: False)
    [killed] = with_endings([RUNNING], Death(1, signal=9))
    assert (killed.ending, killed.code, killed.exit_code) == (Ending.KILLED, Code.KILLED, 137)
    monkeypatch.setattr("hpctrain.system.processes.ran_out_of_memory", lambda pid, born, before: True)
    assert with_endings([RUNNING], Death(1, signal=9))[0].code is Code.OUT_OF_MEMORY
    assert with_endings([RUNNING], Death(1, signal=11))[0].code is Code.KILLED
    elsewhere = dataclasses.replace(RUNNING, host="n9")
    assert with_endings([elsewhere], Death(1, signal=9))[0].code is Code.KILLED, "its kernel cannot be asked"


SRUN = """\
srun: error: task 2 launch failed: Unspecified error
srun: error: task 3 launch failed: Unspecified error
srun: error: n1: tasks 0-1: Killed
"""


@pytest.mark.parametrize(("hosts", "host", "where"), [({2: "n2"}, "n2", " on n2"), ({}, None, "")])
def test_ranks_that_slurm_could_not_start_are_the_nodes_fault(hosts, host, where):
    verdict = lost_node([], SRUN, "", hosts)
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.code) == (2, host, Code.NODE)
    assert verdict.reason == f"rank 2 could not be started{where}: Slurm says 'Unspecified error'"
    assert (f"leave the host out (--exclude {host})" in verdict.fix) is (host is not None)


@pytest.mark.parametrize(
    ("heard", "silent", "told"), [("tasks 0-1", 2, "heard from ranks 2, 3"), ("tasks 0-2", 3, "heard from rank 3")]
)
def test_a_lost_node_is_the_cause_of_what_other_ranks_report(heard, silent, told):
    text = f"srun: error: n1: {heard}: Killed\nsrun: error: Timed out waiting for job step to complete\n"
    verdict = lost_node(FAR, text, "", {})
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.code) == (silent, "n2", Code.NODE)
    assert "n2 was lost" in verdict.reason and verdict.reason.endswith(told)


def test_of_many_ranks_of_lost_nodes_the_first_eight_are_named_with_the_host_of_the_first():
    """Those that told their end themselves are not lost."""
    text = "srun: error: Timed out waiting for job step to complete\n"
    lost = [LastWord(rank, "n2" if rank < 5 else "n3", 1, 0.0, 0.0) for rank in range(1, 11)]
    verdict = lost_node([LastWord(0, "n1", 1, 0.0, 0.0, ended=1.0), *lost], text, "", {})
    assert verdict is not None and (verdict.rank, verdict.host) == (1, "n2")
    assert verdict.reason.endswith("heard from ranks 1, 2, 3, 4, 5, 6, 7, 8")


@pytest.mark.parametrize(
    ("named", "host", "reason"),
    [
        ("  Remote daemon: [prterun-n1-1@0,1] on node n2\n", "n2", "n2 was lost, or the launcher's daemon on it"),
        ("", None, "a node was lost: PRTE has lost communication with a remote daemon."),
    ],
)
def test_a_lost_node_is_named_if_the_launcher_names_it(named, host, reason):
    text = f"PRTE has lost communication with a remote daemon.\n{named}"
    verdict = lost_node([], text, "", {})
    assert verdict is not None and (verdict.host, verdict.reason) == (host, reason)


@pytest.mark.parametrize(
    ("shell", "reason", "code"),
    [
        ("ssh: Could not resolve hostname n2: Name or service not known\n", "n2 could not be reached: ssh: Could ", 64),
        ("Host key verification failed.\n", "n2 could not be reached: Host key verification failed.", 64),
        ("ssh: Could not resolve hostname n2: Temporary failure\n", "n2 could not be reached: ssh: Could not ", 70),
        ("ssh: connect to host n2 port 22: No route to host\n", "n2 could not be reached: ssh: connect to host ", 70),
        ("ssh: connect to host n3 port 22: Connection refused\n", "n2 was lost, or the launcher's daemon on it", 70),
    ],
)
def test_a_host_that_the_remote_shell_does_not_reach_is_told_in_its_words(shell, reason, code):
    """What ssh will say again ends the run with 64, unless there are other hosts to go on with."""
    banner = "A daemon failed to report back after being spawned. This could\n\n  Remote host:   n2\n"
    verdict = lost_node([], shell, banner, {})
    assert verdict is not None and verdict.host == "n2" and verdict.reason.startswith(reason)
    assert verdict.exit_code == code and starts_again(verdict, asked=False)


def test_each_host_has_a_file_of_its_own(run, monkeypatch):
    """NFS does not append atomically for several clients."""
    monkeypatch.setenv(RUN_DIR, str(run.path))
    for attempt, host, rank in (("1", "n1", 0), ("1", "n2", 4), ("1", "n1", 1), ("11", "n1", 2)):
        monkeypatch.setenv(ATTEMPT, attempt)
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        note_death(rank, -9)
    assert [noted.rank for noted in noted_deaths(run, 1)] == [0, 4, 1]
    assert len(list(run.monitor.glob("deaths-1-*"))) == 2


def test_a_line_that_was_cut_off_is_ignored(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    lines = "12.5 4 -9 \n11.0 2  \n12.6 0 14 together\n12.7 1  together\n13."
    (run.monitor / "deaths-1-n1.txt").write_text(lines)
    together = [NotedDeath(12.6, 0, 14, False), NotedDeath(12.7, 1, None, False)]
    assert noted_deaths(run, 1) == [NotedDeath(11.0, 2), NotedDeath(12.5, 4, -9), *together]


RUNNING = LastWord(1, socket.gethostname(), 7, 0.0, 0.0)
FAILED = dataclasses.replace(RUNNING, rank=0, pid=6, ending=Ending.FAILED, ended=1.0)


def test_what_a_rank_said_itself_stands():
    assert with_endings([FAILED], Death(0, signal=9)) == [FAILED]
    assert first_cause([FAILED, Death(0, signal=9)]) is FAILED


def test_a_rank_without_a_death_was_taken_down_if_anybody_failed_or_died():
    assert with_endings([RUNNING], None)[0].ending is Ending.VANISHED
    assert with_endings([FAILED, RUNNING], None)[1].ending is Ending.TAKEN_DOWN
    assert with_endings([RUNNING], Death(0, signal=9))[0].ending is Ending.TAKEN_DOWN
    assert with_endings([RUNNING], Death(1, exit_code=3))[0].exit_code == 3
    assert with_endings([RUNNING], Death(1, exit_code=0))[0].exit_code is None


def test_a_death_without_a_rank_is_that_of_its_process():
    assert first_cause([RUNNING, Death(None, pid=7, signal=11)]) == Death(1, signal=11)
    assert first_cause([RUNNING, Death(None, pid=8, signal=11)]) is None
    assert first_cause([RUNNING, Death(0, pid=7, signal=11)]) == Death(0, signal=11, standing=Standing.KILLED)


@pytest.mark.parametrize(
    ("before", "now", "ran_out"), [(1, 2, True), (1, 1, False), (None, 2, False), (1, None, False)]
)
def test_one_more_kill_of_the_control_group_is_this_rank_s(monkeypatch, before, now, ran_out):
    monkeypatch.setattr("hpctrain.system.processes.kernel_killed_for_memory", lambda pid, born: False)
    monkeypatch.setattr("hpctrain.system.cgroups.oom_kills", lambda: now)
    assert processes.ran_out_of_memory(RUNNING.pid, RUNNING.birth, before) is ran_out


def test_the_last_line_says_something():
    assert last_line("first\n  second  \n-----\n\t=== \n\n") == "second"
    dashes = "-" * 74
    told = f"[vm:1] PMIX ERROR\n{dashes}\nThe listener failed to start. We cannot\ncontinue.\n{dashes}\n"
    assert last_line(told) == "The listener failed to start. We cannot continue."
    told = f"{dashes}\nold\n{dashes}\n{dashes}\nThere are not enough slots.\n\n  python\n\nUse fewer.\n{dashes}\n\n"
    assert last_line(told) == "There are not enough slots."
    assert last_line(f"{told}then this\n") == "then this"
    assert last_line("") == "" and last_line("x" * 400) == "x" * 300


def test_what_mpirun_says_first_is_why_no_rank_started_and_nothing_is_tried_again(tmp_path, monkeypatch):
    dashes = "-" * 74
    unreachable = "At least one pair of MPI processes are unable to reach each other for\nMPI communications.\n\n more"
    ended = 'prterun has exited due to process rank 0 with PID 0 on node vm calling\n"abort".'
    said = "\n".join([dashes, "WARNING: an old name", dashes, dashes, unreachable, dashes, dashes, ended, dashes])
    verdict = missing_ranks([], 2, said, tmp_path / "log", Death(0))
    assert verdict is not None
    sentence = "At least one pair of MPI processes are unable to reach each other for MPI communications."
    assert verdict.reason == f"no rank started: {sentence}"
    assert (verdict.action, verdict.code, verdict.before_ranks) == (Action.FAIL, Code.PREFLIGHT, True)
    files = missing_ranks([], 2, "[vm:1] PRTE ERROR: Unknown error in file odls\n", tmp_path / "log")
    assert files is not None
    assert files.action is Action.FAIL and files.reason.endswith("PRTE ERROR: Unknown error in file odls")
    assert "ulimit" not in files.fix
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (70, limits[1]))
    few = missing_ranks([], 2, "[vm:1] PRTE ERROR: Unknown error in file odls\n", tmp_path / "log")
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert few is not None and "only 70 files here: raise that (ulimit -n" in few.fix
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(postmortem.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    full = missing_ranks([], 2, "[vm:1] PRTE ERROR: Unknown error in file odls\n", tmp_path / "log")
    assert full is not None and full.code is Code.DISK_FULL
    assert full.fix.startswith(f"{tmp_path} has 4 KiB free: free space there, or see ")
    crash = f"{dashes}\nprterun noticed that process rank 0 with PID 5 on node vm exited on signal 11\n{dashes}"
    again = missing_ranks([], 2, crash, tmp_path / "log", Death(0, signal=11))
    assert again is not None and again.action is Action.REQUEUE
    assert startup_error("") == ""


def test_ranks_have_ended_well_if_all_of_them_say_so():
    good = dataclasses.replace(RUNNING, ending=Ending.COMPLETED)
    assert all_ended_well([good, good], 2)
    assert not all_ended_well([good], 2) and not all_ended_well([good, FAILED], 2)


def test_ranks_that_never_spoke_are_counted_and_the_launcher_quoted(tmp_path):
    quoted = missing_ranks([], 2, "something went wrong\n", tmp_path / "log")
    assert quoted is not None
    assert quoted.reason == "2 of 2 ranks ended before they could say why: something went wrong"
    assert (quoted.code, quoted.rank) == (Code.VANISHED, None) and quoted.fix == f"see {tmp_path / 'log'}"
    spoken = [dataclasses.replace(RUNNING, rank=0, ended=1.0, ending=Ending.COMPLETED)]
    silent = missing_ranks(spoken, 2, "", tmp_path / "log")
    assert silent is not None
    assert silent.reason == "1 of 2 ranks ended before they could say why: they printed nothing"
    dead = missing_ranks(spoken, 2, "", tmp_path / "log", Death(1, signal=11))
    assert dead is not None
    assert dead.reason == "1 of 2 ranks ended before they could say why: rank 1 was killed by SIGSEGV"
    assert missing_ranks(spoken, 1, "", tmp_path / "log") is None, "all have spoken"
    assert missing_ranks(spoken, 2, "", tmp_path / "log", Death(0, signal=11)) is None, "its own word is completed"


def test_processes_of_two_hosts_with_one_pid_are_told_apart():
    """In containers, ranks of all nodes have the same few PIDs."""
    words = [dataclasses.replace(RUNNING, rank=rank, host=f"n{rank}.cluster") for rank in range(3)]
    found = [first_cause([*words, Death(None, pid=7, host=host, signal=11)]) for host in ("n0", "n1.cluster", "alias")]
    assert found == [Death(0, signal=11), Death(1, signal=11), None]
