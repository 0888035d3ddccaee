"""Events of training: what sinks get is what is in the file."""

from __future__ import annotations

import importlib.util
import os
import posixpath
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import Eval, Event, RunStarted, decode, encode
from hpctrain.run.figures import Curve, Figures
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from hpctrain.system.signals import StopSignals
from hpctrain.track import events_hook
from hpctrain.track.events_hook import EventsHook
from hpctrain.track.follower import follow, main, position
from hpctrain.track.mlflow import MlflowFollower
from hpctrain.train.clock import IntervalClock
from hpctrain.train.metrics import Evaluation
from tests.support.mpi import PATIENCE_S


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_sinks_get_the_event_that_is_in_the_file(tmp_path):
    path, sink = tmp_path / "events.jsonl", Recorder()
    state = SimpleNamespace(step=4, epoch=1)
    trainer: Any = SimpleNamespace(world=SimpleNamespace(rank=0), state=state, evaluation=Evaluation())
    hook = EventsHook(EventWriter(path, print), IntervalClock(), 1, [sink])
    hook.has_started = True
    hook.after_eval(trainer, {"accuracy": 0.5})
    assert sink.events == decode(path.read_bytes())
    assert isinstance(sink.events[0], Eval) and sink.events[0].metrics == {"accuracy": 0.5}


def test_figures_are_left_in_the_run_folder_and_a_metric_that_is_nan_is_told_once(tmp_path):
    said: list[str] = []
    curve = Curve("x", "y", (0.0, 1.0), (0.0, 1.0))
    trainer: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0),
        state=SimpleNamespace(step=4, epoch=1),
        evaluation=Evaluation({}, {"roc": curve}),
        folder=tmp_path,
    )
    hook = EventsHook(EventWriter(tmp_path / "events.jsonl", said.append), IntervalClock(), 1)
    hook.has_started = True
    for _ in range(2):
        hook.after_eval(trainer, {"auc": float("nan"), "loss": 0.5})
    assert RunView(tmp_path).figures() == Figures(4, {"roc": curve})
    assert len(said) == 1 and "the validation metric auc is nan at step 4" in said[0]
    RunDir(tmp_path).figures.unlink()
    RunDir(tmp_path).figures.mkdir()
    hook.after_eval(trainer, {})
    assert "figures.json" in said[1] and "the report will lack the curves of step 4" in said[1]


def events() -> list[Event]:
    return [RunStarted(step=0), *(Eval(step=step, metrics={"acc@5": 0.5, "loss": 1.0}) for step in range(1, 9))]


@pytest.mark.slow
def test_a_full_disk_costs_the_scalars_and_not_the_run(tmp_path):
    if importlib.util.find_spec("tensorboardX") is None:  # importing it would change the environment
        pytest.skip("tensorboardX is not installed")
    code = """
import resource, sys, time
from pathlib import Path
from hpctrain.run.events import Eval
from hpctrain.track.tensorboard import TensorBoardSink
sink = TensorBoardSink(Path(sys.argv[1]))
sink.event(Eval(step=1, metrics={"loss": 1.0}))
time.sleep(0.3)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
sys.modules["hpctrain.track.tensorboard"].CLOSE_S = 0.5
for step in range(500):
    sink.event(Eval(step=step, metrics={"loss": 1.0}))
sink.close()
print("on")
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "on\n"


def test_a_sink_that_cannot_be_closed_does_not_end_the_run(tmp_path):
    sinks = [Recorder(), Recorder()]
    closed = []
    sinks[0].close = lambda: os.close(-1)  # type: ignore[method-assign]
    sinks[1].close = lambda: closed.append(True)  # type: ignore[method-assign]
    EventsHook(EventWriter(tmp_path / "events.jsonl", print), IntervalClock(), 1, sinks).close()
    assert closed


def test_after_a_second_ctrl_c_a_sink_is_waited_for_briefly(tmp_path, monkeypatch):
    monkeypatch.setattr(events_hook, "HASTE_S", 0.01)
    sink, answer, closed = Recorder(), threading.Event(), threading.Event()
    sink.close = lambda: answer.wait(PATIENCE_S) and closed.set()  # type: ignore[assignment,method-assign]
    signals = StopSignals([signal.SIGINT, signal.SIGINT])
    writer = EventWriter(tmp_path / "events.jsonl", print)
    EventsHook(writer, IntervalClock(), 1, [sink], lambda: signals.insisted).close()
    assert not closed.is_set()
    answer.set()
    assert closed.wait(PATIENCE_S) and not StopSignals([signal.SIGINT, signal.SIGTERM]).insisted


def test_prometheus_gets_names_that_every_exporter_reads(tmp_path):
    pytest.importorskip("prometheus_client")
    from hpctrain.track.prometheus import PrometheusSink

    sink = PrometheusSink(str(tmp_path / "run.prom"), "run")
    for event in events():
        sink.event(event)
    assert 'hpctrain_validation_acc_5{run="run"} 0.5' in (tmp_path / "run.prom").read_text()


class Mlflow:
    """As much of MlflowClient as the follower needs, and as strict with names."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.runs = 0
        self.names: set[str] = set()

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment: str, **fields: Any) -> Any:
        self.runs += 1
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run{self.runs}"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if params and self.fails:
            self.fails -= 1
            raise ConnectionError("no answer")
        for name in (*(one.key for one in metrics), *(one.key for one in params)):
            assert re.fullmatch(r"[/\w.\- :]+", name) and posixpath.normpath(name) == name
            self.names.add(name)

    def set_tag(self, *words: str) -> None:
        pass

    def update_run(self, *words: str, **fields: str) -> None:
        pass


def tracked(folder: Path) -> RunDir:
    (folder / "events.jsonl").write_bytes(b"".join(map(encode, events())))
    (folder / "run.yaml").write_text("name: wave\ntask_args: {a@b: 1, ../c: 2}\n")
    return RunDir(folder)


def test_mlflow_gets_names_that_it_takes(tmp_path):
    pytest.importorskip("mlflow")
    client = Mlflow()
    follower = MlflowFollower(tracked(tmp_path), client, "uri", "hpctrain")
    assert follow(follower, lambda seconds: True), follower.problem
    assert {"task_args.a_b", "validation/acc_5", "validation/loss"} <= client.names


def test_a_server_that_fails_while_a_run_is_opened_gets_one_run(tmp_path):
    pytest.importorskip("mlflow")
    client = Mlflow(fails=3)
    for _ in range(4):
        follow(MlflowFollower(tracked(tmp_path), client, "uri", "hpctrain"), lambda seconds: True)
    assert client.runs == 1
    assert {"name", "validation/loss"} <= client.names


def test_a_store_that_is_not_there_keeps_the_position(tmp_path, monkeypatch):
    def make(*words):
        raise OSError("database is locked")

    (tmp_path / "mlflow.json").write_text('{"uri": "uri", "run_id": "abc", "offset": 12, "problem": null}')
    monkeypatch.setattr(sys, "argv", ["follower", str(tmp_path), "uri", "hpctrain"])
    assert main("mlflow", make) == 1
    assert position(RunDir(tmp_path), "mlflow") == {
        "id": None,
        "uri": "uri",
        "run_id": "abc",
        "offset": 12,
        "has_params": True,
        "problem": "database is locked",
    }
