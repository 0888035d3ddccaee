"""Slow-downs made from outside: two computing ranks, one of which shares its processor or is stopped now and then."""

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
"""Of one processor; on a machine that nobody else uses it is 0.01, with the agent, which is nobody's child any more."""

pytestmark = pytest.mark.alone


def step_of(folder: Path) -> int:
    """The last window's end, as the live view tells."""
    try:
        return int(json.loads((folder / "monitor" / "live.json").read_text())["step"])
    except (OSError, ValueError):
        return 0


def victim_of(folder: Path, over: threading.Event) -> int | None:
    """Rank 1's process, once the ranks' baseline is known."""
    while step_of(folder) < 120:
        if over.wait(0.05):
            return None
    (folder / "disturbed").write_text(str(time.time()))
    return int((folder / "pid-1").read_text())


def burn(folder: Path, over: threading.Event) -> None:
    """A foreign process on the processor of rank 1."""
    if victim_of(folder, over) is None:
        return
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(burner.pid, {1})
    over.wait()
    burner.kill()
    burner.wait()


def stop_now_and_then(folder: Path, over: threading.Event) -> None:
    """Rank 1 does not run for 12 of 40 ms."""
    victim = victim_of(folder, over)
    while victim is not None and not over.wait(0.028):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.012)
            os.kill(victim, signal.SIGCONT)


@contextlib.contextmanager
def disturbed(how: Callable[[Path, threading.Event], None], folder: Path) -> Iterator[None]:
    """Disturbs rank 1 from outside while the body runs."""
    over = threading.Event()
    thread = threading.Thread(target=how, args=(folder, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def used_by_others() -> float:
    """Seconds of processors that went to processes that are not this one's children, and to other machines."""
    spent = psutil.cpu_times()
    ours = os.times()
    total = spent.user + spent.nice + spent.system + spent.irq + spent.softirq + spent.steal
    return total - ours.user - ours.system - ours.children_user - ours.children_system


def accused(
    mpirun: Callable[..., Any], how: Callable[[Path, threading.Event], None], home: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Accusations, and all that was confirmed, in a run on a quiet machine: the best of three.

    On a machine that others use too a processor may be slow from the start, or rank 0 be slowed by a neighbour that no
    counter of this one shows: such a run tells nothing, nor does one during which others took a processor away.
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
    """Of the rank that nobody disturbed; on a busy machine it is disturbed too, and its counters say so."""
    return event["rank"] != 1 and "for a processor" not in " ".join(event["evidence"])


@pytest.mark.world_size(2)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
@pytest.mark.parametrize(("how", "word"), [(burn, "for a processor"), (stop_now_and_then, "")])
def test_a_rank_that_is_disturbed_from_outside_is_found(
    mpirun: Callable[..., Any], tmp_path: Path, how: Callable[[Path, threading.Event], None], word: str
) -> None:
    accusations, events = accused(mpirun, how, tmp_path)
    of_victim = [event for event in accusations if event["rank"] == 1]
    assert of_victim, events
    assert of_victim[0]["cause"] in ("compute", "mixed"), events
    assert word in " ".join(of_victim[-1]["evidence"]), events
    assert not any(map(is_unexplained, accusations)), events
