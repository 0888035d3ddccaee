"""Set-up that never ends, as with endless data: it is told of, and a request to stop ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from hpctrain.errors import Code, ExitCode
from hpctrain.rank import stop_requests
from hpctrain.rank.stop_requests import SetUpWatch
from hpctrain.report.explain import explain
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from hpctrain.run.stop_request import StopRequest, request_stop
from tests.support.command import wait_for
from tests.support.mpi import PATIENCE_S

Ask = Callable[[subprocess.Popen[str], RunDir], object]
TASK = """\
import itertools, pathlib

def task(world):
    for count in itertools.count():
        if count == 1000:
            pathlib.Path("reads").touch()
"""
SHORT = """\
import pathlib
import numpy
import torch
from hpctrain import TorchTask

def task():
    pathlib.Path("runs/r/STOP").touch()
    model = torch.nn.Linear(1, 1)
    data = {"x": numpy.zeros((8, 1), "float32")}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return TorchTask(model=model, loss=lambda output, batch: output.sum(), optimizer=optimizer, train=data)
"""


def by_signal(number: int) -> Ask:
    return lambda rank, run: rank.send_signal(number)


def by_person(rank: subprocess.Popen[str], run: RunDir) -> None:
    run.stop_file.touch()


def by_supervisor(rank: subprocess.Popen[str], run: RunDir) -> None:
    request_stop(run, StopRequest.of_signal(signal.SIGUSR1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "by", "code"),
    [
        (by_signal(signal.SIGINT), "signal SIGINT", Code.STOPPED),
        (by_signal(signal.SIGUSR1), "signal SIGUSR1", Code.TIME_LIMIT),
        (by_person, "STOP file", Code.STOPPED),
        (by_supervisor, "signal SIGUSR1", Code.TIME_LIMIT),
    ],
)
def test_a_request_ends_set_up(tmp_path, ask, by, code):
    (tmp_path / "endless.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text("name: r\ntask: endless.py:task\ntrain: {global_batch: 8, epochs: 1}\n")
    words = [sys.executable, "-m", "hpctrain", "train", "run.yaml"]
    rank = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for("reads", (tmp_path / "reads").exists)
        run = RunDir(tmp_path / "runs" / "r")
        ask(rank, run)
        said = rank.communicate(timeout=PATIENCE_S)[0]
    finally:
        rank.kill()
    assert rank.returncode == ExitCode.STOPPED and f"stopped by {by} before training began (make the task)" in said
    verdict = Attempts(run).all()[-1].verdict
    assert verdict is not None and (verdict.is_failure, verdict.code) == (False, code)
    assert explain(RunView(run.path).history()).cause is code


def test_a_request_ends_a_set_up_that_is_too_short_to_be_interrupted(tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    (tmp_path / "run.yaml").write_text("name: r\ntask: short.py:task\ntrain: {global_batch: 8, epochs: 1}\n")
    words = [sys.executable, "-m", "hpctrain", "train", "run.yaml"]
    rank = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert rank.returncode == ExitCode.STOPPED
    assert "stopped by STOP file before training began (make the task)" in rank.stderr


def test_long_set_up_is_told_of(monkeypatch):
    monkeypatch.setattr(stop_requests, "LOOK_S", 0.01)
    monkeypatch.setattr(stop_requests, "TELL_S", 0.02)
    told, twice = [], threading.Event()

    def tell(text):
        told.append(text)
        if len(told) == 2:
            twice.set()

    with SetUpWatch("open the data", None, tell):
        assert twice.wait(PATIENCE_S)
    assert told[0] == "open the data: 0 s so far"
