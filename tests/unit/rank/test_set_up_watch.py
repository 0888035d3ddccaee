"""Set-up that never ends, as with endless data: it is told of, and a request to stop ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from hpctrain.rank import set_up_watch
from hpctrain.rank.set_up_watch import SetUpWatch
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir

TASK = """\
import itertools, pathlib

def task(world):
    for count in itertools.count():
        if count == 1000:
            pathlib.Path("reads").touch()
"""


def until(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.05)


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT, "file"])
def test_a_request_ends_set_up(tmp_path: Path, asked: signal.Signals | str) -> None:
    (tmp_path / "endless.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text("name: r\ntask: endless.py:task\ntrain: {global_batch: 8, epochs: 1}\n")
    words = [sys.executable, "-m", "hpctrain", "train", "run.yaml"]
    rank = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(tmp_path / "reads")
        run = RunDir(tmp_path / "runs" / "r")
        if isinstance(asked, signal.Signals):
            rank.send_signal(asked)
        else:
            run.stop_file.touch()
        said = rank.communicate(timeout=60)[0]
    finally:
        rank.kill()
    name = asked.name if isinstance(asked, signal.Signals) else "SIGTERM"
    assert rank.returncode == ExitCode.STOPPED and f"stopped by {name} before training began (make the task)" in said
    verdict = Attempts(run).all()[-1].verdict
    assert verdict is not None and not verdict.is_failure


def test_long_set_up_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up_watch, "POLL_S", 0.01)
    monkeypatch.setattr(set_up_watch, "TELL_S", 0.02)
    told, twice = [], threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            twice.set()

    with SetUpWatch("open the data", None, tell):
        assert twice.wait(30)
    assert told[0] == "open the data: 0 s so far"
