"""Own steps in whole runs: the examples of docs/own-steps.md, and the GAN of the examples, interrupted and resumed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.config.sections import CheckpointConfig, Config, MonitorConfig, ReduceConfig, TrackConfig, TrainConfig
from hpctrain.rank.fit import fit
from hpctrain.rank.trial import try_task
from hpctrain.run.event_log import read_events
from hpctrain.run.events import Train
from hpctrain.run.folder import RunDir
from hpctrain.train.hooks import BaseHook, StopReason

pytestmark = [pytest.mark.usefixtures("environment_of_a_run"), pytest.mark.slow]

GAN_FILE = Path(__file__).parents[3] / "examples" / "gan.py"
PAGE = Path(__file__).parents[3] / "docs" / "own-steps.md"
GAN, PAIRS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
PAIRS_TASK = """
from hpctrain import TorchTask


def task():
    model = torch.nn.Linear(9, 4)
    data = {"one": torch.rand(64, 9).numpy(), "other": torch.rand(64, 9).numpy()}
    return TorchTask(model=model, optimizer=torch.optim.Adam(model.parameters()), step=step, train=data)
"""


def config(task: str, folder: Path, **changes: Any) -> Config:
    made = Config(
        name="run",
        task=task,
        run_dir=str(folder / "run"),
        train=TrainConfig(steps=6, global_batch=30),
        reduce=ReduceConfig(kind="none"),
        checkpoint=CheckpointConfig(interval="none"),
        monitor=MonitorConfig(enabled=False),
        track=TrackConfig(every_steps=1),
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(("name", "source"), [("gan_of_page", GAN), ("pairs_of_page", PAIRS + PAIRS_TASK)])
def test_examples_of_the_page(name, source, tmp_path):
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    try_task(config(f"{file}:task", tmp_path))
    summary = fit(config(f"{file}:task", tmp_path))
    assert summary.reason is StopReason.COMPLETED


class Stop(BaseHook):
    """Ends an attempt at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, training: Any, result: Any) -> StopReason | None:
        return StopReason.REQUESTED if training.state.step == self.step else None


def test_a_gan_that_is_interrupted_ends_where_one_that_is_not_ends(tmp_path):
    def run(folder, *hooks):
        saved = CheckpointConfig()
        train = TrainConfig(steps=6, global_batch=30, ema_decay=0.9, eval_every_steps=3)
        made = config(f"{GAN_FILE}:task", tmp_path / folder, checkpoint=saved, train=train)
        return fit(made, hooks=hooks)

    straight = run("straight")
    assert run("twice", Stop(4)).reason is StopReason.REQUESTED
    resumed = run("twice")
    assert resumed.metrics == straight.metrics and set(straight.metrics) == {"recognised", "fooled"}
    one, other = (CheckpointStore(tmp_path / folder / "run/checkpoints").load(6) for folder in ("straight", "twice"))
    assert one.arrays.keys() == other.arrays.keys() >= {"model/generator.1.weight", "ema/discriminator.0.weight"}
    assert [name for name, array in one.arrays.items() if array.tobytes() != other.arrays[name].tobytes()] == []
    reported = [event for event in read_events(RunDir(tmp_path / "straight/run")) if isinstance(event, Train)]
    assert len(reported) == 6
    assert all(event.loss > 0 and event.more["loss_generator"] > 0 for event in reported)
