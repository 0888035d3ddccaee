"""Ranks of plain commands: what their exit codes mean, and what they leave behind."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.comm.launched import launched_rank
from hpctrain.errors import Code
from hpctrain.programs.folder_group import FolderGroup, MeetingStopped
from hpctrain.programs.plain_command import ending, said_last, start_program, watch
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, LastWord
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.run.stop_request import StopRequest, request_stop
from hpctrain.system import processes
from hpctrain.system.signals import StopSignals
from tests.support.command import gone, wait_for
from tests.support.faults import FileServer
from tests.support.mpi import PATIENCE_S

WORD = LastWord(1, "n1", 1, 1.0, 0.0)


@pytest.mark.parametrize(
    ("code", "asked", "expected", "exit_code"),
    [
        (0, False, Ending.COMPLETED, 0),
        (75, False, Ending.STOPPED, 75),
        (75, True, Ending.STOPPED, 75),
        (0, True, Ending.STOPPED, 0),
        (143, True, Ending.STOPPED, 75),
        (-15, True, Ending.STOPPED, 75),
        (3, False, Ending.FAILED, 3),
        (64, True, Ending.FAILED, 64),
        (76, True, Ending.FAILED, 76),
        (-9, False, Ending.FAILED, 137),
    ],
)
def test_exit_codes(code, asked, expected, exit_code):
    made = ending(WORD, "prog", code, asked)
    assert (made.ending, made.exit_code) == (expected, exit_code)
    assert (made.error is not None) == (expected is Ending.FAILED)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (-signal.SIGSEGV, "prog was killed by SIGSEGV"),
        (-signal.SIGABRT, "prog was killed by SIGABRT (OSError: the disk is gone)"),
        (1, "prog ended with exit code 1 (OSError: the disk is gone)"),
    ],
)
def test_what_a_program_said_is_quoted_if_it_ended_itself(code, what):
    made = ending(WORD, "prog", code, False, "OSError: the disk is gone\nbye")
    assert made.error is not None and made.error.what == what
    assert made.error.code is (Code.KILLED if code == -signal.SIGSEGV else Code.EXCEPTION)


def test_what_a_program_said_has_a_code_and_its_fix():
    made = ending(WORD, "prog", 1, False, "DistBackendError: NCCL error in: a.cpp:3\nCuda failure 2 'out of memory'")
    assert made.error is not None and made.error.code is Code.OUT_OF_MEMORY and "smaller batch" in made.error.fix


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        (
            "hpctrain.callbacks",
            f"install hpctrain for prog, or start the program with .* has it, such as {sys.executable}",
        ),
        ("no_such_module", "install no_such_module for prog, or start the program with a Python that has it"),
    ],
)
def test_a_module_that_the_programs_python_lacks(module, fix):
    made = ending(WORD, "prog", 1, False, f"ModuleNotFoundError: No module named '{module}'")
    assert made.error is not None and re.fullmatch(fix, made.error.fix)


def test_a_program_that_the_kernel_killed_for_memory_says_so():
    made = ending(WORD, "prog", -signal.SIGKILL, False, out_of_memory=True)
    assert made.error is not None and made.exit_code == 137
    assert made.error.what == "prog was killed by the kernel: out of memory"
    assert made.error.code is Code.OUT_OF_MEMORY and "launch.slurm.memory" in made.error.fix


@pytest.mark.parametrize(
    ("printed", "quoted"),
    [
        ("step 1\n\nno disk \n\n", "no disk"),
        ("", ""),
        (
            "Traceback (most recent call last):\n  File 'a'\n    old()\nValueError: old\nstep 1\n"
            "Traceback (most recent call last):\n  File 'a'\n    b()\n    ~^\nOSError: no disk\n"
            "terminate called after throwing an instance of 'gloo::IoException'\n",
            "OSError: no disk",
        ),
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]:   File 'a'\n[rank1]: OSError: no disk\n"
            "[rank1]: bye\n",
            "OSError: no disk\nbye",
        ),
        (
            "  + Exception Group Traceback (most recent call last):\n  |   File 'a', line 1, in <module>\n"
            "  |     raise ExceptionGroup('both', [ValueError('no')])\n  | ExceptionGroup: both (1 sub-exception)\n"
            "  +-+---------------- 1 ----------------\n    | ValueError: no\n    +-----------------\n",
            "ExceptionGroup: both (1 sub-exception): ValueError: no",
        ),
        (
            "Traceback (most recent call last):\n  File 'a'\nOSError: no disk\n"
            "Traceback (most recent call last):\n  File 'torchrun'\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\na FAILED\n",
            "OSError: no disk",
        ),
        ("    raise OSError\nno disk\n  File 'a', line 3, in b\n    ~~~^\n", "no disk"),
    ],
)
def test_what_a_program_said_last(tmp_path, printed, quoted):
    (tmp_path / "log").write_text(printed)
    assert said_last(tmp_path / "log") == quoted
    assert said_last(tmp_path / "no log") == ""


def test_the_group_that_python_prints_is_read(tmp_path):
    program = "raise ExceptionGroup('both', [ExceptionGroup('inner', [ValueError('no')]), OSError('late')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (tmp_path / "log").write_text(done.stderr)
    said = said_last(tmp_path / "log")
    assert said.startswith("ExceptionGroup: both (2 sub-exceptions): ") and not said.endswith("-")


@pytest.mark.slow
def test_a_program_that_failed_and_does_not_end_is_ended(tmp_path):
    """Its other ranks waited for it, and nothing ended the run."""
    waits = {
        "thread": "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
        # as mpi4py registers MPI_Finalize, which waits for the other ranks
        "finalize": "import ctypes; ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))",
    }
    started = {
        name: start(RunDir(tmp_path / name), sys.executable, "-c", f"{program}; raise OSError('no disk')")
        for name, program in waits.items()
    }
    for name, process in started.items():
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1, name
        assert "OSError: no disk" in word(RunDir(tmp_path / name))["error"]["what"]  # type: ignore[index]


def test_a_program_that_asks_a_question_gets_no_answer(tmp_path):
    """Open MPI gives rank 0 a pipe that never ends: nobody can answer in a batch job."""
    reading, writing = os.pipe()
    try:
        process = start(RunDir(tmp_path / "run"), sys.executable, "-c", "input('overwrite? ')", stdin=reading)
        process.communicate(timeout=PATIENCE_S)
    finally:
        os.close(reading)
        os.close(writing)
    assert process.returncode == 1
    assert "EOFError" in word(RunDir(tmp_path / "run"))["error"]["what"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 0),
        ({"SLURM_PROCID": "3"}, 3),
        ({"SLURM_PROCID": "0", "PMIX_RANK": "2"}, 2),
        ({"PMI_RANK": "1"}, 1),
        ({"SLURM_PROCID": "x"}, None),
    ],
)
def test_the_launcher_says_which_rank(environ, expected):
    assert launched_rank(environ) == expected


def start(
    run_dir: RunDir, *command: str, process_group: int | None = None, stdin: int | None = None
) -> subprocess.Popen[str]:
    """A rank of a command in a run folder."""
    run_dir.create()
    environment = {**os.environ, RUN_DIR: str(run_dir.path), ATTEMPT: "1"}
    words = [sys.executable, "-m", "hpctrain.programs.plain_command", *command]
    return subprocess.Popen(
        words, env=environment, stdin=stdin, stdout=subprocess.PIPE, text=True, process_group=process_group
    )


def word(run_dir: RunDir) -> dict[str, object]:
    """The one last word."""
    (path,) = (run_dir.ranks / "1").glob("*.json")
    return dict(json.loads(path.read_text()))


def test_output_and_last_word(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    process = start(run_dir, "bash", "-c", "echo to the user; echo to the log >&2; exit 3")
    assert process.communicate(timeout=PATIENCE_S)[0] == "to the user\n"
    assert process.returncode == 3
    assert run_dir.log(0, 1).read_text() == "to the log\n"
    assert (word(run_dir)["ending"], word(run_dir)["exit_code"]) == ("failed", 3)


def test_the_stop_file_becomes_a_signal(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    process = start(run_dir, "bash", "-c", "trap 'exit 75' TERM; echo ready; while :; do sleep 0.05; done")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    request_stop(run_dir, StopRequest("a test"))
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, "launchers end all ranks where one fails"
    assert word(run_dir)["ending"] == "stop_requested"


def test_a_signal_to_all_processes_leaves_the_program_its_time(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    program = "trap 'echo saving; sleep 0.2; echo saved; exit 75' TERM; echo ready; while :; do sleep 0.05; done"
    process = start(run_dir, "bash", "-c", program, process_group=0)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE_S)[0] == "saving\nsaved\n"
    assert word(run_dir)["ending"] == "stop_requested"


def test_a_program_that_is_not_there(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    process = start(run_dir, "/no/such/program")
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 64
    assert word(run_dir)["error"]["what"] == "cannot run /no/such/program: No such file or directory"  # type: ignore[index]


def test_the_program_dies_with_its_rank(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    process = start(run_dir, "bash", "-c", "echo $$; exec sleep 60")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    wait_for("end of the program with its rank", lambda: gone(child))


@pytest.mark.parametrize(("received", "code"), [([], -signal.SIGTERM), ([signal.SIGTERM], 0)])
def test_a_program_that_has_got_the_stop_signal_does_not_get_it_again(tmp_path, received, code):
    run = RunDir(tmp_path)
    run.create()
    request_stop(run, StopRequest("somebody"))
    signals = StopSignals()
    signals.received.extend(received)  # schedulers send it to all processes of a rank
    child = subprocess.Popen(["sleep", "1" if received else "600"])
    assert watch(child, run, 1, 1, signals, tmp_path / "log")[0]
    assert child.returncode == code


def test_a_file_server_that_fails_ends_no_program(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.create()
    server = FileServer(errno.EIO, "STOP", "stat", 1000).install(monkeypatch)
    child = subprocess.Popen(["sleep", "0.3"])
    assert watch(child, run, 1, 1, StopSignals(), tmp_path / "log") == (False, 0) and server.failed
    (tmp_path / "log").write_text("Traceback (most recent call last):\nValueError: seen to\n")
    server = FileServer(errno.EIO, "log", "stat", 1000).install(monkeypatch)
    child = subprocess.Popen(["sleep", "0.3"])
    assert watch(child, run, 1, 1, StopSignals(), tmp_path / "log") == (False, 0) and server.failed


def test_ranks_meet_although_the_file_server_fails(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    server = FileServer(errno.ESTALE, "ranks/1", "open", 3).install(monkeypatch)
    first, second = (FolderGroup("g", run, 1, rank, 2) for rank in range(2))
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(second.allgather, "b")
        assert first.allgather("a") == other.result() == ["a", "b"] and server.failed == 3


def test_a_signal_while_a_program_starts_is_not_lost(monkeypatch):
    signals = StopSignals()
    with monkeypatch.context() as patch:
        # Between fork and exec the process is still this one, with its handlers.
        patch.setattr(processes, "die_with_parent", lambda: os.kill(os.getpid(), signal.SIGTERM))
        signals.install()
        try:
            child = start_program(["sleep", "60"], os.environ, signals)
        finally:
            signals.restore()
    assert child.wait(PATIENCE_S) == -signal.SIGTERM
    assert not signals.received
    signals.received.append(signal.SIGTERM)
    with pytest.raises(MeetingStopped):
        start_program(["true"], os.environ, signals)
