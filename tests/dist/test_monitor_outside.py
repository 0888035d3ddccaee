"""Slowdowns caused from outside: of two computing ranks, one shares its core or is stopped at intervals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PROGRAM = Path(__file__).parent / "programs" / "monitored_loop.py"
ACCUSING = ("rank", "host", "pauses")
MOST_SHARED = 0.1
"""Largest share of one core used by others; on an idle machine it is 0.01, including the orphaned agent."""

pytestmark = pytest.mark.alone


def step_of(folder: Path) -> int:
    """Last step of the newest window, from the live view."""
    try:
        return int(json.loads((folder / "monitor" / "live.json").read_text())["step"])
    except (OSError, ValueError):
        return 0


def victim_of(folder: Path, over: threading.Event) -> int | None:
    """Process of rank 1, once the ranks' baseline is known."""
    while step_of(folder) < 120:
        if over.wait(0.05):
            return None
    (folder / "disturbed").write_text(str(time.time()))
    return int((folder / "pid-1").read_text())


def burn(folder: Path, over: threading.Event) -> None:
    """Run a foreign process on rank 1's core."""
    if victim_of(folder, over) is None:
        return
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(burner.pid, {1})
    over.wait()
    burner.kill()
    burner.wait()


def stop_now_and_then(folder: Path, over: threading.Event) -> None:
    """Stop rank 1 for 12 of every 40 ms."""
    victim = victim_of(folder, over)
    while victim is not None and not over.wait(0.028):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.012)
            os.kill(victim, signal.SIGCONT)


@contextlib.contextmanager
def disturbed(how: Callable[[Path, threading.Event], None], folder: Path) -> Iterator[None]:
    """Disturb rank 1 from outside while the context lasts."""
    over = threading.Event()
    thread = threading.Thread(target=how, args=(folder, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def used_by_others() -> float:
    """CPU seconds used by processes other than this one's children, and stolen by other virtual machines."""
    spent = psutil.cpu_times()
    ours = os.times()
    total = spent.user + spent.nice + spent.system + spent.irq + spent.softirq + spent.steal
    return total - ours.user - ours.system - ours.children_user - ours.children_system


def accused(
    mpirun: Callable[..., Any], how: Callable[[Path, threading.Event], None], home: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Accusations, and all confirmed events, of a run on a quiet machine: the best of three.

    On a shared machine, a core may be slow from the start, or a neighbour that no local counter shows may slow rank 0.
    Such a run proves nothing, nor does one during which others took a core.
    """
    for attempt in range(3):
        folder = home / str(attempt)
        folder.mkdir()
        before = used_by_others()
        began_run = time.monotonic()
        with disturbed(how, folder):
            mpirun(2, PROGRAM, folder, json.dumps({"steps": 900, "computes": True, "pin": True}))
        is_shared = used_by_others() - before > MOST_SHARED * (time.monotonic() - began_run)
        lines = (folder / "monitor" / "events.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event["state"] == "confirmed"]
        accusations = [event for event in events if event["kind"] in ACCUSING]
        began = float((folder / "disturbed").read_text())
        if not is_shared and not any(event["time"] < began or is_unexplained(event) for event in accusations):
            break
    return accusations, events


def is_unexplained(event: dict[str, Any]) -> bool:
    """Whether an event accuses the undisturbed rank without its counters showing a disturbance by a busy machine."""
    return event["rank"] != 1 and "for a processor" not in " ".join(event["evidence"])


@pytest.mark.world_size(2)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
@pytest.mark.parametrize(("how", "word"), [(burn, "for a processor"), (stop_now_and_then, "")])
def test_a_rank_that_is_disturbed_from_outside_is_found(mpirun, tmp_path, how, word):
    accusations, events = accused(mpirun, how, tmp_path)
    of_victim = [event for event in accusations if event["rank"] == 1]
    assert of_victim, events
    assert of_victim[0]["cause"] in ("compute", "mixed"), events
    assert word in " ".join(of_victim[-1]["evidence"]), events
    assert not any(map(is_unexplained, accusations)), events
