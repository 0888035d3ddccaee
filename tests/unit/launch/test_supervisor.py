"""What a supervisor does around an attempt."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import Code, ExitCode, NoRequeue, RunFailed
from hpctrain.launch import attempt as attempts
from hpctrain.launch.attempt import Launch, Limits, WatchedAttempt
from hpctrain.launch.supervisor import report, supervise
from hpctrain.run import last_words
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.decision import blame
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import CUT_OFF, AboutRank, Hang, Resumed, SnapshotSaved
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, LastWord, WordFile, first_word
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.stop_request import StopRequest, requested_stop
from hpctrain.run.verdict import Action, RunVerdict, failed_with
from hpctrain.system.signals import StopSignals
from tests.support.faults import FileServer

SUPERVISOR = """
import json, sys
from pathlib import Path
from hpctrain.launch import attempt, supervisor
from hpctrain.run.attempts import Attempt
from hpctrain.run.folder import RunDir
attempt.END_GRACE_S = attempt.WORDS_EVERY_S = 0.05
saves, folder, *words = sys.argv[1:]
launch = attempt.Launch(words, {}, 2, saves=saves == "True")
verdict = supervisor.supervise(RunDir(Path(folder)), lambda number: launch, attempt.Limits(), Attempt())
print(json.dumps(verdict.to_json()))
"""


def watching(run: RunDir, ranks: int = 1, number: int = 1, limits: Limits = Limits(), **launch: Any) -> WatchedAttempt:  # noqa: B008 (frozen)
    """An attempt that is not started."""
    run.create()
    given = Launch(launch.pop("command", []), {}, ranks, **launch)
    return WatchedAttempt(given, run, number, LiveLock(run, myself()), StopSignals(), limits)


def on_nodes(count: int = 2) -> list[LastWord]:
    """The words of a rank on each node, from n1 on."""
    return [dataclasses.replace(first_word(rank), host=f"n{rank + 1}") for rank in range(count)]


def lost(attempt: WatchedAttempt) -> tuple[Any, ...] | None:
    """Code, host and rank of what ends an attempt."""
    found = attempt.failure
    return found and (found.code, found.host, found.rank)


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "action"), [(True, "requeue"), (False, "done")])
def test_ranks_of_ours_end_together_those_of_a_plain_program_need_not(tmp_path, saves, action):
    rank = f"{shlex.quote(sys.executable)} -m hpctrain.programs.plain_command"
    ranks = f"PMI_RANK=0 {rank} true & PMI_RANK=1 {rank} sleep 1; wait"
    words = [sys.executable, "-c", SUPERVISOR, str(saves), str(tmp_path / "run"), "bash", "-c", ranks]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["action"] == action, done.stdout


def test_a_rank_in_a_container_of_its_own_processes_is_not_taken_for_dead(tmp_path):
    attempt, here = watching(RunDir(tmp_path)), first_word(0)
    assert attempt.lives(here) and not attempt.lives(dataclasses.replace(here, birth=1.0))
    assert attempt.lives(dataclasses.replace(here, pid=2, birth=1.0, machine="another namespace"))


@pytest.mark.parametrize(
    ("said", "patience_s"), [("", 10), ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.", 42)]
)
def test_srun_gets_the_time_that_it_takes_to_tell_a_lost_node(tmp_path, said, patience_s):
    attempt = watching(run := RunDir(tmp_path), 2)
    run.log("launcher", 1).write_text(said)
    dead = dataclasses.replace(first_word(0), birth=1.0)
    WordFile.of(run, 1, dead).begin(dead)
    for now in (0, patience_s):
        attempt.look_at_ranks(now)
        assert attempt.failure is None
    attempt.look_at_ranks(patience_s + 1)
    assert attempt.failure is not None and attempt.failure.code == "killed"


def starting(rank: int) -> LastWord:
    """The word of a process that waits in MPI_Init."""
    return dataclasses.replace(first_word(rank), joined=False)


def watched(run: RunDir, *words: LastWord, ranks: int = 2) -> WatchedAttempt:
    """An attempt of hpctrain ranks, of which some have left these words."""
    attempt = watching(run, ranks)
    for number, word in enumerate(words):
        word = dataclasses.replace(word, host=f"n{number}", machine="elsewhere")
        WordFile.of(run, 1, word).begin(word)
    return attempt


@pytest.mark.parametrize(
    ("words", "limit_s", "said"),
    [
        ([], attempts.START_S, "ranks [0, 1] of 2 did not start within 600 s"),
        ([starting(0)], attempts.START_S, "ranks [1] of 2 did not start within 600 s"),
        ([starting(0), starting(1)], attempts.JOIN_S + 1, "MPI did not connect ranks [0, 1] within 120 s"),
        ([first_word(0), starting(1)], attempts.JOIN_S + 1, "MPI did not connect ranks [1] within 120 s"),
        ([first_word(0), first_word(1)], 1e6, None),
    ],
)
def test_ranks_that_give_no_sign_of_life_have_a_limit(tmp_path, words, limit_s, said):
    attempt = watched(RunDir(tmp_path), *words)
    for now in (0.0, limit_s - 1.0):
        attempt.look_at_ranks(now)
        assert attempt.failure is None
    attempt.look_at_ranks(limit_s + 1.0)
    if said is None:
        assert attempt.failure is None
    else:
        assert attempt.failure is not None and said in attempt.failure.reason
        assert (attempt.failure.code, attempt.failure.action) == (Code.HANG, Action.REQUEUE)


def test_ranks_that_a_stop_request_finds_in_mpi_init_are_not_waited_for(tmp_path):
    run = RunDir(tmp_path)
    attempt = watched(run, starting(0), starting(1))
    run.stop_file.touch()
    attempt.take_stop_file(0.0)
    for now in (0.0, attempts.FAILURE_GRACE_S + 1):
        attempt.look_at_ranks(now)
    assert attempt.ended_at < float("inf")


def test_a_rank_that_dies_in_mpi_init_is_named_with_its_host(tmp_path):
    said = "srun: error: n1: task 1: Segmentation fault\n"
    attempt = watched(run := RunDir(tmp_path), starting(0), starting(1))
    run.log("launcher", 1).write_text(said)
    words, failure = attempt.concluded(last_words.collect(run, 1))
    verdict = failure or blame(words)
    assert verdict.reason == "rank 1 on n1 was killed by SIGSEGV" and verdict.code is Code.KILLED


def test_ranks_that_end_in_mpi_init_leave_the_launchers_reason(tmp_path):
    attempt = watched(run := RunDir(tmp_path), starting(0), starting(1))
    run.log("launcher", 1).write_text("PMIX ERROR: NO-PERMISSIONS\n")
    _, failure = attempt.concluded(last_words.collect(run, 1))
    assert failure is not None
    assert failure.reason == "2 of 2 ranks ended before they could say why: PMIX ERROR: NO-PERMISSIONS"


@pytest.mark.parametrize(("left_s", "grace_s"), [(float("inf"), 60.0), (1000.0, 60.0), (60.0, 50.0), (8.0, 6.0)])
def test_what_follows_a_stop_has_time_before_the_job_ends(tmp_path, left_s, grace_s):
    attempt = watched(RunDir(tmp_path))
    attempt.limits = Limits(60.0, left_s=lambda: left_s)
    attempt.begin_stop(100.0, StopRequest.of_signal(signal.SIGUSR1))
    assert attempt.stop_deadline == 100.0 + grace_s


def test_a_stop_that_the_ranks_saw_before_the_supervisor_is_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.launch.attempt.WORDS_EVERY_S", 600.0)
    run = RunDir(tmp_path / "run")
    run.create()
    lock = LiveLock(run, myself())
    with lock.held():
        launch = Launch(["sh", "-c", f"sleep 0.3; touch '{run.stop_file}'"], {}, 1)
        number = Attempts(run).begin()
        attempt = WatchedAttempt(launch, run, number, lock, StopSignals(), Limits())
        attempt.run()
    assert attempt.stop is not None and attempt.stop.by_person


def test_a_host_that_is_known_to_be_away_ends_the_attempt(tmp_path):
    away: set[str] = set()
    attempt = watching(RunDir(tmp_path), 2, away=lambda: away)
    attempt.look_at_nodes(100.0, on_nodes())
    assert attempt.failure is None
    away.add("n2")
    attempt.look_at_nodes(100.5, on_nodes())
    assert lost(attempt) == (Code.NODE, "n2", 1)


@pytest.mark.parametrize("can_lose", [False, True])
def test_a_host_that_the_monitor_cannot_reach_is_lost_if_there_is_another_place(tmp_path, can_lose):
    run, words = RunDir(tmp_path), on_nodes()
    attempt = watching(run, 2, 2, can_lose=lambda host: can_lose and host == "n2")
    run.monitor.mkdir(exist_ok=True)
    writer = EventWriter(run.monitor_events, print)
    writer.append(Hang(step=8, attempt=1, kind=CUT_OFF, ranks=(AboutRank(1, "n2"),)))
    writer.append(Hang(step=9, attempt=2, kind="hung", ranks=(AboutRank(1, "n2"),)))
    attempt.look_at_nodes(100.0, words)
    assert attempt.failure is None, "an earlier attempt's, or another kind"
    writer.append(Hang(step=9, attempt=2, kind=CUT_OFF, ranks=(AboutRank(1, "n2"),)))
    attempt.look_at_nodes(101.0, words)
    assert lost(attempt) == ((Code.NODE, "n2", 1) if can_lose else None)
    assert attempt.failure is None or "Slurm" not in attempt.failure.reason + attempt.failure.fix
    assert attempt.kill_at == (101.0 if can_lose else float("inf")), "mpirun would wait for it"


@pytest.mark.parametrize("answers", [False, True])
def test_a_node_that_neither_srun_hears_of_nor_answers_is_lost_at_once(tmp_path, answers):
    run, words = RunDir(tmp_path), on_nodes()
    attempt = watching(run, 2, unreached=lambda hosts: [] if answers else {"n2"} & set(hosts))
    said = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\nsrun: error: n1: task 0: Killed\n"
    run.log("launcher", 1).write_text(said)
    attempt.look_at_nodes(100.0, words)
    assert attempt.failure is None, "it may be about to speak"
    attempt.look_at_nodes(102.5, words)
    assert lost(attempt) == (None if answers else (Code.NODE, "n2", 1))
    assert attempt.kill_at == (float("inf") if answers else 102.5)


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ([Ending.RUNNING, Ending.VANISHED], "mpirun was killed by SIGKILL, and all ranks with it"),
        ([Ending.COMPLETED, Ending.VANISHED], "mpirun was killed by SIGKILL, and 1 of 2 ranks with it"),
        ([Ending.FAILED, Ending.RUNNING], None),
    ],
)
@pytest.mark.parametrize("ended_by_us", [False, True])
def test_a_killed_launcher_is_named_unless_a_rank_says_why(tmp_path, ends, sentence, ended_by_us):
    attempt = watching(RunDir(tmp_path), 2, command=["mpirun"])
    attempt.launcher.process = subprocess.Popen(["sleep", "60"])
    attempt.launcher.process.kill()
    attempt.launcher.process.wait()
    words = [dataclasses.replace(first_word(rank), ending=end) for rank, end in enumerate(ends)]
    words[1] = dataclasses.replace(words[1], host="n2", pid=attempt.launcher.process.pid)  # as any host may have
    if ended_by_us:
        attempt.end(0.0, None)
    _, verdict = attempt.concluded(words)
    assert (verdict and verdict.reason) == (None if ended_by_us else sentence)


@pytest.mark.parametrize(("own", "code"), [(None, Code.PREFLIGHT), (Code.READ_ONLY, Code.READ_ONLY)])
def test_what_prevents_the_start_is_the_verdict(tmp_path, own, code):
    def make_launch(number):
        raise NoRequeue("scratch of n2 cannot be written", "exclude n2", own)

    run = RunDir(tmp_path / "run")
    verdict = supervise(run, make_launch, Limits(), Attempt(ranks=2))
    assert (verdict.action, verdict.exit_code, verdict.code) == (Action.FAIL, ExitCode.DO_NOT_REQUEUE, code)
    assert verdict.before_ranks
    assert (verdict.reason, verdict.fix) == ("scratch of n2 cannot be written", "exclude n2")
    [attempt] = Attempts(run).all()
    words = last_words.read(run, 1)
    assert words is not None and attempt.verdict == words.verdict == verdict
    assert not run.lock_file.exists()


def test_what_prevents_the_start_is_said_though_the_folder_cannot_be_written(tmp_path):
    def make_launch(number):
        (run.path / "ranks").rmdir()
        raise NoRequeue("scratch of n2 cannot be written", "exclude n2")

    run = RunDir(tmp_path / "run")
    assert supervise(run, make_launch, Limits(), Attempt()).reason == "scratch of n2 cannot be written"


def test_looks_at_very_many_ranks_take_little_of_the_time(tmp_path, monkeypatch):
    looks: list[float] = []

    def slow(*_):
        looks.append(time.monotonic())
        time.sleep(0.2)  # a thousand files on Lustre take longer
        return []

    monkeypatch.setattr(attempts.WordReader, "look", slow)
    monkeypatch.setattr(attempts, "WORDS_EVERY_S", 0.05)
    supervise(RunDir(tmp_path), lambda number: Launch(["sleep", "1"], {}, 1), Limits(), Attempt())
    assert len(looks) == 1, "when it begins"


def test_ranks_that_save_after_a_stop_request_have_time_as_long_as_the_checkpoint_grows(tmp_path):
    attempt = watching(run := RunDir(tmp_path), limits=Limits(stop_grace_s=60))
    partial = run.checkpoints / ".partial-step-000000009-token"
    partial.mkdir()
    attempt.begin_stop(0, StopRequest.of_signal(signal.SIGTERM))
    for now in (50, 100, 150):
        with open(partial / "shard-00000-of-00001.h5", "ab") as shard:
            shard.write(bytes(100))
        attempt.look_at_save(now)
        assert attempt.stop_deadline == now + 60
    attempt.look_at_save(190)
    assert attempt.stop_deadline == 210, "it has not grown"


def test_a_checkpoint_that_grows_counts_although_the_next_look_is_minutes_away(tmp_path):
    """The words of thousands of ranks take seconds to read, so looks are minutes apart."""
    run = RunDir(tmp_path)
    run.create()
    attempt = WatchedAttempt(Launch([], {}, 1), run, 1, LiveLock(run, myself()), StopSignals(), Limits(stop_grace_s=60))
    attempt.next_look = math.inf
    partial = run.checkpoints / ".partial-step-000000009-token"
    partial.mkdir()
    attempt.begin_stop(0, StopRequest.of_signal(signal.SIGTERM))
    (partial / "shard-00000-of-00001.h5").write_bytes(bytes(100))
    attempt.tick(61)
    assert attempt.failure is None and attempt.stop_deadline == 121
    attempt.tick(122)
    assert attempt.failure is not None and attempt.failure.code is Code.STOP, "it has not grown"
    (partial / "shard-00000-of-00001.h5").write_bytes(bytes(200))
    attempt.tick(123)
    assert attempt.stop_deadline == 121, "it has been ended: the folder is not listed twenty times a second"


def test_a_stop_signal_reaches_the_ranks_once_the_file_server_is_back(tmp_path, monkeypatch):
    attempt = watching(RunDir(tmp_path))
    attempt.signals.received = [signal.SIGUSR1]
    server = FileServer(errno.ESTALE, ".STOP", "open", 2).install(monkeypatch)
    for now in range(3):
        assert requested_stop(attempt.run_dir) is None
        attempt.take_signals(now)
    asked = requested_stop(attempt.run_dir)
    assert server.failed == 2 and asked is not None and asked.signal is signal.SIGUSR1
    attempt.run_dir.stop_file.unlink()
    attempt.take_signals(3)
    assert not attempt.run_dir.stop_file.exists(), "it is written once"


def test_of_the_monitors_events_only_those_of_this_attempt_are_read(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    run.monitor_events.write_bytes(b"{}\n" * 1_000_000)  # of a long run
    attempt = WatchedAttempt(Launch([], {}, 2), run, 2, LiveLock(run, myself()), StopSignals(), Limits())
    attempt = dataclasses.replace(attempt, launch=Launch([], {}, 2, can_lose=lambda host: True))
    assert not attempt.cut_off()
    EventWriter(run.monitor_events, print).append(Hang(step=8, attempt=2, kind=CUT_OFF, ranks=(AboutRank(1, "n2"),)))
    assert attempt.cut_off() == {"n2"}, "at the next look, not after all the old ones"


def test_a_launcher_that_starts_nothing_is_not_waited_for_after_a_stop_request(tmp_path, monkeypatch):
    """It was for launch.stop_grace_s."""
    monkeypatch.setattr(attempts, "FAILURE_GRACE_S", 0.0)
    monkeypatch.setattr(attempts, "WORDS_EVERY_S", 0.05)
    run = RunDir(tmp_path)
    run.create()
    program = "import sys, time; open(sys.argv[1], 'x').close(); time.sleep(600)"
    launch = Launch([sys.executable, "-c", program, str(run.stop_file)], {}, 1)
    verdict = supervise(run, lambda number: launch, Limits(stop_grace_s=600), Attempt())
    assert (verdict.exit_code, verdict.reason) == (ExitCode.STOPPED, "stopped by STOP file before any rank began")


@pytest.mark.parametrize(
    ("received", "ended"),
    [
        ([signal.SIGHUP, signal.SIGHUP], False),
        ([signal.SIGINT, signal.SIGHUP], False),
        ([signal.SIGINT, signal.SIGINT], True),
        ([signal.SIGTERM, signal.SIGINT], True),
    ],
)
def test_a_terminal_that_closes_is_not_a_second_ctrl_c(tmp_path, received, ended):
    attempt = watching(RunDir(tmp_path))
    attempt.signals.received = received
    attempt.take_signals(0.0)
    assert (attempt.failure is not None) is ended and attempt.stop is not None


ONCE = "n=$(cat count 2>/dev/null || echo 0); echo $((n + 1)) > count; "
"""A shell program that counts its attempts."""


def attempts_in_place(
    folder: Path, program: str, limits: Limits, before_again: Callable[[], object] = int
) -> RunVerdict:
    """Attempts of one plain rank that runs a shell program in a folder."""

    def again(verdict: RunVerdict) -> Attempt:
        before_again()
        return Attempt(ranks=1)

    words = [
        sys.executable,
        "-m",
        "hpctrain.programs.plain_command",
        "bash",
        "-c",
        f"cd {shlex.quote(str(folder))}; {program}",
    ]
    launch = Launch(words, {}, 1, saves=False)
    return supervise(RunDir(folder / "run"), lambda number: launch, limits, Attempt(ranks=1), again=again)


@pytest.mark.parametrize(
    ("program", "max_failures", "codes"),
    [
        ("[ $n = 1 ] || kill -9 $$", 3, [70, 0]),
        ("exit 3", 2, [70, 76]),
        ("exit 3", 0, [70]),
        ("exit 64", 3, [64]),
        ("exit 76", 3, [76]),
        ("exit 75", 3, [75]),
    ],
)
@pytest.mark.slow
def test_a_failed_attempt_is_started_again_as_often_as_it_may_fail(tmp_path, program, max_failures, codes):
    verdict = attempts_in_place(tmp_path, ONCE + program, Limits(max_failures=max_failures))
    assert [each.verdict.exit_code for each in Attempts(RunDir(tmp_path / "run")).all() if each.verdict] == codes
    assert verdict.exit_code == codes[-1] and not RunDir(tmp_path / "run").lock_file.exists()


@pytest.mark.slow
def test_a_stop_request_that_comes_between_two_attempts_holds_for_the_next_one(tmp_path):
    run = RunDir(tmp_path / "run")
    program = ONCE + "[ $n = 0 ] && exit 3; trap 'exit 75' TERM; sleep 60 & wait"
    verdict = attempts_in_place(tmp_path, program, Limits(max_failures=3), run.stop_file.touch)
    assert verdict.action is Action.STOP and run.stop_file.exists()
    assert (tmp_path / "count").read_text() in ("1\n", "2\n")


@pytest.mark.slow
def test_a_folder_that_another_supervisor_took_between_two_attempts_is_left_to_it(tmp_path):
    run = RunDir(tmp_path / "run")
    verdict = attempts_in_place(tmp_path, "exit 3", Limits(max_failures=3), lambda: Attempts(run).begin())
    assert verdict.code is Code.IN_USE and len(Attempts(run).all()) == 2, "no third one fences it off"


@pytest.mark.slow
def test_what_cannot_begin_again_ends_with_the_verdict_on_the_attempt_before(tmp_path):
    def full():
        (tmp_path / "run" / "STOP").mkdir()
        (tmp_path / "run" / "run.json").unlink()
        (tmp_path / "run" / "run.json").mkdir()

    verdict = attempts_in_place(tmp_path, "exit 3", Limits(max_failures=3), full)
    assert verdict.action is Action.REQUEUE and "code 3" in verdict.reason


@pytest.mark.slow
def test_a_stop_request_while_a_rank_fails_is_the_end(tmp_path):
    verdict = attempts_in_place(tmp_path, ONCE + "touch run/STOP; exit 3", Limits(max_failures=3))
    assert len(Attempts(RunDir(tmp_path / "run")).all()) == 1 and verdict.action in (Action.STOP, Action.REQUEUE)


@pytest.mark.parametrize("error", [RunFailed("Slurm does not answer", "see"), OSError(errno.EKEYEXPIRED, "expired")])
def test_a_node_that_cannot_be_replaced_at_the_moment_is_left_to_a_requeue(tmp_path, monkeypatch, error):
    def again(verdict):
        raise error

    lost = failed_with(Code.NODE, "n2 was lost", "", host="n2")
    monkeypatch.setattr(WatchedAttempt, "run", lambda self: (lost, []))
    assert supervise(RunDir(tmp_path), lambda _: Launch([], {}, 1), Limits(), Attempt(), again=again) == lost


def test_a_lost_node_that_is_lost_again_and_again_is_given_up(tmp_path, monkeypatch):
    lost = failed_with(Code.NODE, "n2 was lost", "", host="n2")
    monkeypatch.setattr(WatchedAttempt, "run", lambda self: (lost, []))
    verdict = supervise(
        RunDir(tmp_path), lambda number: Launch([], {}, 1), Limits(), Attempt(), again=lambda verdict: Attempt()
    )
    assert verdict == lost and len(Attempts(RunDir(tmp_path)).all()) == 3


def test_the_end_of_a_run_names_the_step_and_the_command_that_resumes_it(tmp_path, capfd):
    run, verdict = (
        RunDir(tmp_path),
        failed_with(Code.KILLED, "rank 1 on n1 was killed by SIGKILL", "see the ranks' logs"),
    )
    command = ["hpctrain", "run", "it's.yaml", "--name", "a b"]
    report(verdict, run, command)
    assert f"resume from the beginning: {shlex.join(command)}" in capfd.readouterr().err
    (run.checkpoints / "step-000000120").mkdir(parents=True)
    (run.checkpoints / "step-000000120" / "manifest.json").touch()
    report(verdict, run, command)
    assert f"resume from step 120: {shlex.join(command)}" in capfd.readouterr().err
    program = RunDir(tmp_path / "program")
    report(verdict, program, command, saves=False)
    assert f"resume: {shlex.join(command)}" in capfd.readouterr().err
    program.create()
    program.saved_step.write_text("7\n")
    report(verdict, program, command, saves=False)
    assert f"resume from step 7: {shlex.join(command)}" in capfd.readouterr().err
    report(dataclasses.replace(verdict, exit_code=ExitCode.USER_ERROR), run, command)
    assert "resume" not in capfd.readouterr().err
    stopped = RunVerdict(Action.STOP, ExitCode.STOPPED, "stopped by ada", "the same command resumes it")
    report(stopped, run, command)
    assert "fix:" not in capfd.readouterr().err, "a stop on request is no failure, and the command is in the last line"
    writer = EventWriter(run.events, print)
    newer = "from step 125 if its snapshot is complete, else "
    for step in (115, 125):
        number = Attempts(run).begin()
        Attempts(run).update(trained=number)
        writer.append(SnapshotSaved(step=step, tier="memory", attempt=number))
        report(verdict, run, command)
        assert f"resume {newer * (step > 120)}from step 120: {shlex.join(command)}" in capfd.readouterr().err
    number = Attempts(run).begin()
    report(verdict, run, command)
    assert newer in capfd.readouterr().err, "that attempt has not trained: the snapshot is still there"
    writer.append(Resumed(step=125, tier="memory", attempt=number))
    Attempts(run).update(trained=number)
    report(verdict, run, command)
    assert newer in capfd.readouterr().err, "it has taken it over"
    Attempts(run).update(trained=Attempts(run).begin())
    report(verdict, run, command)
    assert "resume from step 120" in capfd.readouterr().err, "that attempt has not sealed one"


BOTH_JOINED = "[ $(ls run/ranks/1/*.json 2>/dev/null | wc -l) = 2 ]"
TWO_RANKS = f"{{rank}} sleep 60 & PMI_RANK=1 {{rank}} sleep 60 & until {BOTH_JOINED}; do sleep 0.1; done; "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "named"),
    [
        (TWO_RANKS + "kill -9 $$", "bash"),
        ("exec {rank} bash -c 'kill -9 $PPID'", "rank 0 on"),
    ],
)
def test_who_killed_the_launcher_is_told_from_who_killed_a_rank(tmp_path, program, named):
    rank = f"{shlex.quote(sys.executable)} -m hpctrain.programs.plain_command"
    ranks = 2 if "&" in program else 1
    words = ["bash", "-c", f"cd {shlex.quote(str(tmp_path))}; {program.replace('{rank}', rank)}"]
    launch = Launch(words, {"PMI_RANK": "0"}, ranks, saves=False)
    verdict = supervise(RunDir(tmp_path / "run"), lambda number: launch, Limits(), Attempt(ranks=ranks))
    assert verdict.reason.startswith(named) and "was killed by SIGKILL" in verdict.reason
    assert verdict.code is Code.KILLED


def test_failures_of_an_earlier_command_use_up_no_tries(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    for job in ("7", None, "8", "9"):
        number = Attempts(run).begin(Attempt(job=job))
        Attempts(run).end(number, failed_with(Code.EXCEPTION, "no", ""), [])
    make: Any = WatchedAttempt

    def counted(first, *jobs):
        return [
            each.number for each in make(None, run, 4, None, None, Limits(jobs=jobs), first=first).attempts_so_far()
        ]

    assert counted(4) == [4], "a command that is given again"
    assert counted(3) == [3, 4], "started again in place"
    assert counted(4, "9", "8") == [3, 4], "a job and the one that it replaces"
    assert counted(4, "7") == [1, 4]


def test_the_reason_for_which_an_attempt_was_ended_stands(tmp_path):
    attempt = watching(RunDir(tmp_path), limits=Limits(2.0))
    attempt.next_look = math.inf
    attempt.begin_stop(0.0, StopRequest.of_signal(signal.SIGINT))
    attempt.signals.received += [signal.SIGINT, signal.SIGINT]
    for now in (1.0, 3.0):  # the ranks take longer to end than they had to stop
        attempt.tick(now)
        assert attempt.failure is not None and attempt.failure.reason == "ended at once by a second Ctrl-C"


def test_a_launcher_that_cannot_be_started_is_a_failed_attempt(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.create()

    def no_process(*words, **options):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    number = Attempts(run).begin(Attempt(ranks=2))
    lock = LiveLock(run, myself())
    verdict, words = WatchedAttempt(Launch(["mpirun"], {}, 2), run, number, lock, StopSignals(), Limits()).run()
    assert (verdict.action, words) == (Action.REQUEUE, [])
    assert verdict.reason == "mpirun could not be run: Resource temporarily unavailable"
