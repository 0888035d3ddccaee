"""Hung ranks: the monitor names the rank and its stack, and no process remains. Needs permission to trace."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from tests.support.mpi import PATIENCE_S, Result

PROGRAM = Path(__file__).parent / "programs" / "monitored_loop.py"
HANG_S = 4


def run(
    mpirun: Callable[..., Any], folder: Path, ranks: int = 2, env: Mapping[str, str] | None = None, **script: Any
) -> tuple[dict[str, Any], Result, float]:
    """Run the loop until it hangs; return the event, the launcher's result, and the elapsed seconds."""
    monitor = {"hang_s": HANG_S, "on_hang": "abort"}
    began = time.monotonic()
    words = json.dumps({"steps": 10_000, "monitor": monitor, **script})
    result = mpirun(ranks, PROGRAM, folder, words, env=env, check=False)
    seconds = time.monotonic() - began
    assert nobody_is_left(folder), "an agent may write after its ranks have ended"
    [event] = hangs(folder)
    return event, result, seconds


def hangs(folder: Path) -> list[dict[str, Any]]:
    """Events about hangs."""
    path = folder / "monitor" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == "hang"]


def nobody_is_left(folder: Path, patience_s: float = PATIENCE_S) -> bool:
    """Wait until ranks and agents are gone; agents may take some seconds to notice the end of their ranks."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        ranks = [int(file.read_text()) for file in folder.glob("pid-*")]
        agents = [process for process in psutil.process_iter() if agent_of(process, folder)]
        if not agents and not any(psutil.pid_exists(pid) for pid in ranks):
            return True
        time.sleep(0.1)
    return False


def agent_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process is a node agent that logs into this folder."""
    try:
        return any(file.path.startswith(str(folder)) for file in process.open_files())
    except psutil.Error:
        return False


@pytest.mark.alone  # compares times
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("trouble", "victim"), [("stop", 0), ("spin", 1)])
def test_a_hung_rank_is_named_with_its_stack_and_the_attempt_ends(mpirun, tmp_path, trouble, victim):
    event, result, seconds = run(mpirun, tmp_path, trouble=trouble, victim=victim)
    assert [rank["rank"] for rank in event["ranks"]] == [victim]
    assert HANG_S <= event["silence_s"] <= HANG_S + 2
    assert seconds < HANG_S + 20
    assert event["step"] in (39, 40)
    stack = (tmp_path / event["ranks"][0]["stack"]).read_text()
    assert "befall" in stack
    assert ("endless_loop" in stack) == (trouble == "spin")
    [healthy] = event["healthy"]
    assert healthy["rank"] == 1 - victim
    assert "monitored_loop.py" in (tmp_path / healthy["stack"]).read_text()
    assert event["action"] == "abort"
    assert f"rank {victim} on" in result.output
    assert result.returncode != 0


@pytest.mark.world_size(4)
def test_a_rank_that_dies_without_notice_is_named(mpirun, tmp_path):
    supervised = {RUN_DIR: str(tmp_path), ATTEMPT: "1"}  # mpirun ends the others; the first death is recorded
    event, _, _ = run(mpirun, tmp_path, ranks=4, env=supervised, trouble="die", victim=2)
    assert event["kind"] == "died"
    assert [(rank["rank"], rank["state"]) for rank in event["ranks"]] == [(2, "gone")]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("agents_too", [True, False])
def test_a_suspended_run_goes_on_and_is_not_ended(mpirun, tmp_path, agents_too):
    script = {"steps": 700, "monitor": {"hang_s": HANG_S, "on_hang": "abort"}}
    suspender = threading.Thread(target=suspend, args=(tmp_path, agents_too))
    suspender.start()
    result = mpirun(2, PROGRAM, tmp_path, json.dumps(script))
    suspender.join()
    assert (tmp_path / "suspended").exists(), result.output
    assert nobody_is_left(tmp_path)
    assert not hangs(tmp_path)


def suspend(folder: Path, agents_too: bool) -> None:
    """Suspend the ranks once they have started, for twice the time that counts as a hang."""
    deadline = time.monotonic() + PATIENCE_S
    while len(pids := [int(text) for file in folder.glob("pid-*") if (text := file.read_text())]) < 2:
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    time.sleep(1)  # the first steps have a separate limit
    agents = [process.pid for process in psutil.process_iter() if agent_of(process, folder)] if agents_too else []
    for pid in (*agents, *pids):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * HANG_S)  # the test is about the passing of time
    for pid in (*pids, *agents):
        os.kill(pid, signal.SIGCONT)
    (folder / "suspended").touch()
