"""Ranks that a process with all imports forks: what they take over, how they end, and what if that process cannot."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.launch.forks.forking import BACKENDS, STAND_IN, Forking, backends
from hpctrain.launch.forks.parent import FORK_SAFE
from hpctrain.run.folder import RunDir
from hpctrain.system.processes import own_folder
from tests.support.command import environment, gone, wait_for
from tests.support.mpi import PATIENCE_S

SHOWS = """
import json, os, random, resource, signal, sys, threading
import numpy
print("on stderr", file=sys.stderr)
json.dump({
    "argv": sys.argv, "cwd": os.getcwd(), "X": os.environ.get("X"), "MPI": os.environ.get("PMIX_RANK"),
    "umask": os.umask(0), "affinity": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "stdin": sys.stdin.read(), "threads": threading.active_count(), "main": __name__, "beside": sys.path[0],
    "signals": [str(signal.getsignal(each)) for each in (signal.SIGCHLD, signal.SIGTERM)],
    "words": open("/proc/self/cmdline").read().rstrip(chr(0)),
    "chance": [random.random(), numpy.random.random()],
}, sys.stdout)
"""
ENDS = """
import os, signal, sys, time
if sys.argv[1] == "code":
    sys.exit(7)
if sys.argv[1] == "signal":
    os.kill(os.getpid(), signal.SIGSEGV)
signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(5))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    """One that has imported both frameworks."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "task.py").write_text("import keras\nfrom torch import nn\n")
    with own_folder("/dev/shm") as place:
        made = Forking(f"{folder / 'task.py'}:task", RunDir(folder), environment({"OMP_NUM_THREADS": "2"}), place)
        made.words([sys.executable, "-P", "-m", "hpctrain", "train", "long-enough-for-other-words", "x" * 200])
        yield made
        made.close()


def started(words: list[str], folder: Path, text: str, *args: str) -> subprocess.Popen[str]:
    """A program after these words, in surroundings of its own."""
    program = folder / "program.py"
    program.write_text(text)

    def surroundings() -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.umask(0o27)
        os.nice(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))

    return subprocess.Popen(
        [*words, str(program), *args],
        cwd=folder,
        env=environment({"X": "\udcff", "PMIX_RANK": "3"}),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=surroundings,  # noqa: PLW1509 (only system calls)
    )


def shown(words: list[str], folder: Path) -> tuple[dict[str, Any], str]:
    """What SHOWS finds, and standard error."""
    with started(words, folder, SHOWS, "one", "two words") as child:
        said, errors = child.communicate("from outside", PATIENCE_S)
    assert child.returncode == 0, errors
    return json.loads(said), errors


@pytest.mark.slow
def test_a_fork_is_what_its_stand_in_would_have_become(forking, tmp_path):
    alone, _ = shown([sys.executable], tmp_path)
    fork, errors = shown(forking.words([sys.executable]), tmp_path)
    other, _ = shown(forking.words([sys.executable]), tmp_path)
    assert errors == "on stderr\n"
    chances = [each.pop("chance") for each in (alone, fork, other)]
    assert all(len(set(column)) == 3 for column in zip(*chances, strict=True)), chances
    assert fork == alone and alone["umask"] == 0o27 and alone["files"] == [123, 456]


@pytest.mark.slow
def test_the_parent_has_no_threads_that_forks_would_lack(forking, tmp_path):
    shown(forking.words([sys.executable]), tmp_path)  # libraries end theirs when it forks
    tasks = Path(f"/proc/{forking.pid}/task").iterdir()
    names = [(task / "comm").read_text().strip() for task in tasks if task.name != str(forking.pid)]
    assert set(names) <= FORK_SAFE


@pytest.mark.slow
def test_stand_ins_end_as_their_ranks_do(forking, tmp_path):
    for how, code in (("code", 7), ("signal", -signal.SIGSEGV)):
        with started(forking.words([sys.executable]), tmp_path, ENDS, how) as child:
            child.communicate(timeout=PATIENCE_S)
        assert child.returncode == code
    with started(forking.words([sys.executable]), tmp_path, ENDS, "") as child:
        assert int(child.stdout.readline()) != child.pid  # type: ignore[union-attr]
        child.send_signal(signal.SIGUSR1)
        assert child.wait(PATIENCE_S) == 5


@pytest.mark.slow
def test_ranks_end_with_their_stand_ins_and_with_the_parent_which_can_be_started_again(forking, tmp_path):
    with started(forking.words([sys.executable]), tmp_path, ENDS, "") as child:
        rank = int(child.stdout.readline())  # type: ignore[union-attr]
        child.kill()
    wait_for("end of the rank", lambda: gone(rank))
    with started(forking.words([sys.executable]), tmp_path, ENDS, "") as child:
        rank = int(child.stdout.readline())  # type: ignore[union-attr]
        before = forking.pid
        psutil.Process(before).kill()
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
    wait_for("end of the rank", lambda: gone(rank))
    assert shown(forking.words([sys.executable]), tmp_path)[0]["X"] == "\udcff"
    assert forking.pid != before


@pytest.mark.slow
def test_a_stand_in_that_nobody_answers_becomes_the_rank(tmp_path):
    words = [sys.executable, "-I", "-S", str(STAND_IN), str(tmp_path / "nobody")]
    found, errors = shown(words, tmp_path)
    assert found["beside"] == str(tmp_path)
    assert errors.startswith("hpctrain: this rank is not forked but started: ") and errors.endswith("on stderr\n")


@pytest.mark.slow
def test_a_parent_with_threads_forks_nothing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    with own_folder("/dev/shm") as place:
        forking = Forking("", RunDir(tmp_path), environment({"PYTHONPATH": str(tmp_path)}), place)
        _, errors = shown(forking.words([sys.executable]), tmp_path)
        forking.close()
    assert "the process that would fork it has ended" in errors or "Connection re" in errors


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nimport torch.nn as nn", {"torch"}),
        ("from hpctrain import KerasTask", {"keras"}),
        ("import torch, tensorflow.data", {"torch", "keras"}),
        ("def task():\n    import torch", set()),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", set()),
        ("from os import environ as e\nif True:\n    e.update(A='1')\nimport keras", set()),
        ("import os, torch\ndef task(): return os.environ['HOME']", {"torch"}),
        ("def (", set()),
        ("\0", set()),
    ],
)
def test_the_frameworks_that_a_file_imports_at_its_top_are_known_without_running_it(text, found, tmp_path):
    (tmp_path / "task.py").write_text(f"raise SystemExit\n{text}" if found else text)
    expected = sorted({BACKENDS[name] for name in found})
    assert backends(f"{tmp_path / 'task.py'}:task", RunDir(tmp_path)) == expected


def test_a_module_is_found_and_an_earlier_attempt_tells_what_imports_do_not(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    assert backends("hpctrain.tasks.torch_digits:task", run_dir) == [BACKENDS["torch"]]
    assert backends("no.such.module:task", run_dir) == backends("", run_dir) == []
    run_dir.create()
    run_dir.events.write_text(
        '{"time": 1.0, "event": "run_started", "step": 0, "attempt": 1, "schema": 1, "framework": "tensorflow"}\n'
    )
    (tmp_path / "task.py").write_text("from mine import model\n")
    assert backends(f"{tmp_path / 'task.py'}:task", run_dir) == [BACKENDS["keras"]]
