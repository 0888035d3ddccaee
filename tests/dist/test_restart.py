"""`hpctrain run` restarts a failed attempt in place, with the same sample order and bitwise identical weights."""

from __future__ import annotations

import functools
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from tests.support.command import (
    PROJECT,
    assert_explained,
    endings,
    events,
    hpctrain,
    is_parent,
    last_words,
    leftovers,
    misbehaving_run,
    processes_of,
    ranks_of,
    reaches_step,
    started,
    wait_for,
    write_run,
)
from tests.support.gate import Gate
from tests.support.mpi import LAUNCH_S

pytestmark = pytest.mark.world_size(4)
STEPS, HELD_AT = 80, 25
"""Number of steps of a run, and the step after which it waits for a fault."""
RESTARTED: dict[str, Any] = {"launch": {}}


def launcher_of(pid: int) -> psutil.Process:
    return next(each for each in processes_of(pid) if "mpirun" in each.cmdline()[0] or "prterun" in each.cmdline()[0])


def losses(run: Path) -> dict[int, float]:
    """Loss by step; of repeated steps, the last one counts."""
    return {event["step"]: event["loss"] for event in events(run, "train")}


def waits(gate: Gate, run: Path) -> None:
    """Wait until all ranks wait between two steps."""
    gate.await_ranks(4)


def saves(gate: Gate, run: Path) -> None:
    """Wait until a checkpoint is being written, or at least the ranks wait between two steps."""

    def look() -> bool:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:  # a save takes milliseconds
            if any((run / "checkpoints").glob(".partial-*")):
                return True
        return any(gate.folder.glob("held-1-*"))

    wait_for("start", reaches_step(run, 1))  # seconds, in which looking that often would slow the ranks down
    wait_for("save", look)


def kill_a_rank(pid: int) -> None:
    ranks_of(pid)[pid % 4].kill()


def kill_the_parent(pid: int) -> None:
    """Kill the process that forks the ranks."""
    next(filter(is_parent, psutil.Process(pid).children())).kill()


def kill_the_launcher(pid: int) -> None:
    launcher_of(pid).kill()


def digits(folder: Path, framework: str) -> Path:
    return write_run(
        folder,
        task=f"{PROJECT}/tests/tasks/held_{framework}_digits.py:task",
        task_args={"gate": str(folder / "gate"), "at": HELD_AT},
        run_dir=str(folder / "run"),
        train={"steps": STEPS, "global_batch": 32, "threads": 1},
        checkpoint={"every_steps": 10},
        reduce={"kind": "mpi"},
        track={"every_steps": 1},
        monitor={"window_steps": 4},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Run folder of a framework's undisturbed run, which is launched once."""

    @functools.cache
    def launched(framework: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        hpctrain("run", "-n", 4, digits(folder, framework), warm=framework)
        return folder / "run"

    return launched


@pytest.mark.parametrize(
    ("framework", "befall", "when"),
    [
        ("torch", kill_a_rank, waits),
        ("torch", kill_the_launcher, waits),
        ("torch", kill_the_parent, waits),
        ("torch", kill_a_rank, saves),
        ("tensorflow", kill_a_rank, waits),
    ],
)
def test_a_run_that_loses_a_rank_or_its_launcher_ends_as_one_that_does_not(
    tmp_path,
    whole,
    framework,
    befall,
    when,
):
    gate = Gate(tmp_path / "gate").close(1)
    with started("run", "-n", 4, digits(tmp_path, framework)) as child:
        when(gate, tmp_path / "run")
        befall(child.pid)
        gate.open()
        said, errors = child.communicate(timeout=LAUNCH_S)
    assert child.returncode == 0, said + errors
    attempts = Attempts(RunDir(tmp_path / "run")).all()
    assert [each.verdict.exit_code for each in attempts if each.verdict] == [70, 0]
    assert "starting again from" in errors and "SIGKILL" in errors
    assert losses(tmp_path / "run") == losses(whole(framework))
    assert len(losses(tmp_path / "run")) == STEPS
    ends = [*last_words(tmp_path / "run", 2), *last_words(whole(framework))]
    hashes = {word["weights_hash"] for word in ends}
    assert len(hashes) == 1, "bit for bit"
    [recovered] = events(tmp_path / "run", "recovered")
    assert recovered["attempt"] == 2 and recovered["code"] == "killed"
    assert 0 < recovered["seconds"] < 60
    assert recovered["repeated_steps"] < STEPS
    assert not leftovers(tmp_path)


def test_an_error_of_the_task_that_repeats_at_the_same_step_is_not_tried_a_third_time(tmp_path):
    file = misbehaving_run(tmp_path, "raise", checkpoint={"enabled": False}, **RESTARTED)
    said = hpctrain("run", "-n", 2, file, code=76, warm="torch")
    attempts = Attempts(RunDir(tmp_path / "run")).all()
    assert [each.verdict.action for each in attempts if each.verdict] == ["requeue", "do_not_requeue"]
    assert "bad sample" in said.stderr and "for the second time at step 3" in said.stderr


@pytest.mark.parametrize("mode", ["nan", "raise-in-task"])
def test_what_would_fail_again_is_final_at_once_or_at_the_second_time(tmp_path, mode):
    said = hpctrain("run", "-n", 2, misbehaving_run(tmp_path, mode, **RESTARTED), code=76, warm="torch")
    assert len(Attempts(RunDir(tmp_path / "run")).all()) == (1 if mode == "nan" else 2), said.stderr


def test_a_run_that_is_killed_again_and_again_ends_and_says_what_resumes_it(tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    file = misbehaving_run(folder, "kill", **{**RESTARTED, "launch": {"max_failures": 2}})
    said = hpctrain("run", "-n", 2, file, "--checkpoint.every_steps", 50, code=76, warm="torch")
    attempts = Attempts(RunDir(folder / "run")).all()
    assert len(attempts) == 2 and "2 attempts in a row failed" in said.stderr
    assert_explained(folder / "run", "killed", "2 attempts in a row", "rank 1")
    command = ["hpctrain", "run", "-n", "2", str(file), "--checkpoint.every_steps", "50"]
    [line] = re.findall(r"^  resume from the beginning: (.+)$", said.stderr, re.MULTILINE)
    assert shlex.split(line) == command


def test_ctrl_c_ends_a_run_that_was_started_again(tmp_path):
    sections = {"train": {"steps": 500}, "track": {"every_steps": 1}, "checkpoint": {"every_steps": 2}}
    with started(
        "run", "-n", 2, misbehaving_run(tmp_path, **sections, **RESTARTED), env={"STEP_S": "0.1"}, warm="torch"
    ) as child:
        wait_for("step", reaches_step(tmp_path / "run", 5))
        ranks_of(child.pid)[1].kill()
        wait_for("recovery", lambda: events(tmp_path / "run", "recovered"))
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=LAUNCH_S)
    assert child.returncode == 75, errors
    assert endings(tmp_path / "run", 2) == ["stop_requested", "stop_requested"]
    (stop,) = events(tmp_path / "run", "stop_requested")
    assert {word["step"] for word in last_words(tmp_path / "run", 2)} == {stop["step"]}
    assert RunDir(tmp_path / "run").newest_checkpoint_step() == stop["step"]
    assert f"resume from step {stop['step']}: hpctrain run -n 2" in errors


@pytest.mark.parametrize(("allowed", "attempts"), [(None, 1), (3, 2)])
def test_a_plain_command_is_started_again_only_if_asked(tmp_path, allowed, attempts):
    program = f"echo run >> {shlex.quote(str(tmp_path / 'runs'))}; [ $HPCTRAIN_ATTEMPT = 2 ] || kill -9 $$"
    more = [] if allowed is None else ["--launch.max_failures", str(allowed)]
    words = ["--name", "x", "--run_dir", str(tmp_path / "run"), *more, "--", "bash", "-c", program]
    said = hpctrain("run", "-n", 1, *words, code=70 if attempts == 1 else 0)
    assert (tmp_path / "runs").read_text().count("run") == attempts, said.stderr
