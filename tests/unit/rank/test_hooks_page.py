"""The examples of docs/hooks.md, each in a run, and profiles by the run file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hpctrain.config.sections import (
    CheckpointConfig,
    Config,
    MonitorConfig,
    ProfileConfig,
    ReduceConfig,
    TrackConfig,
    TrainConfig,
)
from hpctrain.errors import UserError
from hpctrain.rank import wiring
from hpctrain.rank.fit import fit
from hpctrain.run.events import Event
from hpctrain.run.figures import read_pictures
from hpctrain.system.output import quiet_environment
from hpctrain.train.hooks import BaseHook, StopReason
from hpctrain.train.loop import RunSummary
from tests.tasks import scheduled_keras_tasks, scheduled_tasks

PAGE = Path(__file__).parents[3] / "docs" / "hooks.md"
EXAMPLES = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
TASK = """
import dataclasses

from tests.tasks import scheduled_tasks


def task():
    made = scheduled_tasks.task()
    model, x = made.model, made.train["x"]
    return dataclasses.replace(made, hooks=[{hook}])
"""
CONFIG = Config(
    name="run",
    task=f"{scheduled_tasks.__file__}:task",
    train=TrainConfig(steps=20, global_batch=8),
    reduce=ReduceConfig(kind="none"),
    checkpoint=CheckpointConfig(interval="none"),
    monitor=MonitorConfig(enabled=False),
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run sets, for the test only."""
    for name, value in quiet_environment(False, {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # set by tensorboardX
    monkeypatch.syspath_prepend("")


class Watch(BaseHook):
    """Ends an attempt at a step; keeps what it has seen."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.first_layer: list[Any] = []

    def after_step(self, training: Any, result: Any) -> StopReason | None:
        self.first_layer.append(training.framework.model[0].weight.detach().clone())
        return StopReason.REQUESTED if training.state.step == self.last else None


def run(folder: Path, hook: str, watch: Watch | None = None, steps: int = 20) -> RunSummary:
    """A run whose task has an example's hook, in <folder>/run."""
    file = folder / f"hooked_{hook.partition('(')[0]}.py"
    file.write_text(EXAMPLES + TASK.format(hook=hook))
    train = dataclasses.replace(CONFIG.train, steps=steps)
    config = dataclasses.replace(CONFIG, task=f"{file}:task", run_dir=str(folder / "run"), train=train)
    return fit(config, hooks=[watch] if watch else [])


def test_freezing(tmp_path):
    watch = Watch()
    run(tmp_path, "FrozenAtFirst(model[0], 12)", watch)
    moved = [not before.equal(after) for before, after in zip(watch.first_layer, watch.first_layer[1:], strict=False)]
    assert moved == [False] * 11 + [True] * 8


def test_sample_pictures_in_the_report_and_in_tensorboard(tmp_path):
    run(tmp_path, 'SamplePictures({"x": x[:4]}, (1, 1))')
    names = [f"samples-{step:09d}" for step in (5, 10, 15, 20)]
    assert [picture.name for picture in read_pictures(tmp_path / "run/pictures")] == names
    with Image.open(tmp_path / f"run/pictures/{names[0]}.png") as picture:
        assert picture.size == (4, 1)
    assert list((tmp_path / "run/tensorboard/pictures").iterdir())


def test_own_logging(tmp_path):
    run(tmp_path, "WeightNorms(model)")
    lines = [json.loads(line) for line in (tmp_path / "run/norms.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20]
    assert set(lines[0]["norms"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_ending_by_a_rule_of_ones_own_that_counts_over_resumes(tmp_path):
    hook = "GoodEnough(loss=1e9, evaluations=3)"
    assert run(tmp_path, hook, Watch(last=12)).reason is StopReason.REQUESTED  # after two evaluations
    for _ in range(2):  # ends, and stays ended
        summary = run(tmp_path, hook)
        assert (summary.reason, summary.step) == (StopReason.EARLY, 15)


def test_a_profiler_of_ones_own(tmp_path):
    run(tmp_path, "MemoryProfile(5, 7)")
    assert "aten::" in (tmp_path / "run/memory.txt").read_text()


@pytest.mark.parametrize(("hook", "message"), [("WeightNorms", "holds the class WeightNorms"), ("3", "holds an int")])
def test_what_is_no_hook_is_refused(hook, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, hook)


def profiled(folder: Path, task: str = CONFIG.task, steps: int = 8, **section: Any) -> Path:
    """The folder of the traces of a run."""
    track = TrackConfig(profile=ProfileConfig(**section))
    train = dataclasses.replace(CONFIG.train, steps=steps)
    fit(dataclasses.replace(CONFIG, task=task, run_dir=str(folder), train=train, track=track))
    return folder / "profile"


def test_track_profile_records_the_steps_that_are_asked_for(tmp_path):
    traces = profiled(tmp_path / "a", first_step=3, last_step=4)
    (trace,) = traces.iterdir()
    assert trace.name == "rank-00000-from-step-000000003.pt.trace.json"
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]
    assert sum("Optimizer.step#AdamW.step" in name for name in names) == 2
    assert not profiled(tmp_path / "b", first_step=3, ranks=(1,)).exists()
    assert len(list(profiled(tmp_path / "c", first_step=7).iterdir())) == 1  # the run ends before the fifth step
    (trace,) = profiled(tmp_path / "d", first_step=2).iterdir()
    assert trace.read_text().count("Optimizer.step#AdamW.step") == 5


def test_track_profile_of_keras(tmp_path):
    task = f"{scheduled_keras_tasks.__file__}:task"
    traces = profiled(tmp_path, task, steps=5, first_step=2, last_step=3)
    assert list(traces.glob("rank-00000-from-step-000000002/plugins/profile/*/*.xplane.pb"))


def test_a_profile_needs_steps_in_order():
    for wrong in (
        {"first_step": 5, "last_step": 4},
        {"last_step": 4},
        {"first_step": 0},
        {"first_step": 1, "ranks": (-1,)},
    ):
        with pytest.raises(UserError, match=r"track\.profile"):
            ProfileConfig(**wrong)


class Closes(BaseHook):
    """A hook, and a sink, that notes its end."""

    closed = False

    def event(self, event: Event) -> None:
        """Is not called."""

    def close(self) -> None:
        self.closed = True


def test_hooks_and_sinks_are_closed_if_the_next_one_cannot_be_made(tmp_path, monkeypatch):
    hook, sink = Closes(), Closes()

    def sinks(*given):
        yield sink
        raise UserError("the second sink cannot be made", "none")

    monkeypatch.setattr(wiring, "make_sinks", sinks)
    with pytest.raises(UserError, match="the second sink cannot be made"):
        fit(dataclasses.replace(CONFIG, run_dir=str(tmp_path)), hooks=[hook])
    assert hook.closed and sink.closed
