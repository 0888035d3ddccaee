"""The hook on the loop, with a framework of a few lines of NumPy."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import numpy as np
import pytest

from hpctrain.checkpoint import policy as policy_module
from hpctrain.checkpoint import saver as saver_module
from hpctrain.checkpoint.hook import CheckpointHook, gone_since
from hpctrain.checkpoint.policy import Retention, policy_of
from hpctrain.checkpoint.store import CheckpointStore, best_steps, load_weights
from hpctrain.comm.world import alone
from hpctrain.config.sections import CheckpointConfig
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData
from hpctrain.errors import NoRequeue, Replaced, RunFailed, UserError
from hpctrain.run.attempts import Attempt
from hpctrain.run.events import CheckpointFailed, Event
from hpctrain.train.clock import IntervalClock, Phase
from hpctrain.train.hooks import BaseHook, Hook, StopReason
from hpctrain.train.loop import Trainer
from hpctrain.train.schedule import Duration
from hpctrain.train.state import ArrayTensor, TrainState
from hpctrain.train.stateful import Kept, PerRank, kept_state
from tests.support.fake_framework import FakeFramework
from tests.support.mpi import PATIENCE_S

E = TypeVar("E", bound=Event)


class Counter(FakeFramework):
    """A weight that counts steps, and a loss that it is told."""

    def __init__(self, losses: Mapping[int, float] | None = None, spoiled_at: float = math.inf) -> None:
        self.weight = np.zeros(3)
        self.spoiled_at = spoiled_at
        self.losses = losses or {}

    def step(self, micro_batches: Sequence[Any], global_samples: int) -> Any:
        self.weight += 1
        if self.weight[0] >= self.spoiled_at:
            self.weight[1] = math.nan

    def evaluate(self, batch: Any, meters: Any = ()) -> dict[str, tuple[float, float]]:
        return {"loss": (self.losses.get(int(self.weight[0]), 1.0), 1.0)}

    def state(self) -> list[ArrayTensor]:
        return [ArrayTensor("model/weight", self.weight, is_trained=True)]

    def load(self, arrays: Mapping[str, Any]) -> None:
        self.weight[...] = arrays["model/weight"]


class Interrupt(BaseHook):
    """Ends the run at a step, or does something there."""

    def __init__(self, step: int, action: Any = lambda: StopReason.REQUESTED) -> None:
        self.step = step
        self.action = action

    def after_step(self, trainer: Trainer, result: Any) -> StopReason | None:
        return self.action() if trainer.state.step == self.step else None


class Lost(Exception):
    """The process is gone."""


def lose() -> None:
    raise Lost


class Run:
    """Attempts at a run in a folder."""

    def __init__(self, folder: Path, seed: int = 0, **config: Any) -> None:
        self.config = CheckpointConfig(**config)
        self.folder = folder
        self.make_store: Any = CheckpointStore
        self.make_tiers: Any = lambda: None
        self.make_remote: Any = lambda: None
        self.world = alone()
        self.events: list[Event] = []
        self.identity: dict[str, Any] = {"config": {"seed": seed, "train": {}}, "global_batch": 2, "data": "abc"}

    def attempt(
        self,
        *hooks: Hook,
        steps: int = 10,
        losses: Mapping[int, float] | None = None,
        fresh: bool = False,
        fence: Any = lambda: None,
        spoiled_at: float = math.inf,
        state: Sequence[Kept] = (),
    ) -> Counter:
        """Trains to the end or until a hook ends it."""
        kept = Retention(self.config.keep_last, self.config.keep_every_steps)
        self.store = self.make_store(self.folder, kept, fence=fence)
        report = self.events.append
        policy = policy_of(self.config)
        given = (self.store, policy, self.config, self.identity, report, hooks, fresh, state, self.make_tiers())
        self.hook = hook = CheckpointHook(*given, self.make_remote())
        framework, clock = Counter(losses, spoiled_at), IntervalClock()
        data = TrainingData(open_dataset({"x": np.zeros((8, 1))}), Order(8, 2, seed=0), 0, 1, prefetch=0)
        plan = Duration(steps, 4, eval_every_steps=1 if losses else None)
        validation = {"validation": [{"x": np.zeros((1, 1))}]}
        trainer = Trainer(
            self.world, framework, lambda step: 1.0, plan, clock, TrainState(), data, validation, [hook, *hooks]
        )  # type: ignore[arg-type]
        with closing(hook), closing(data):
            trainer.fit()
        self.phases = clock.take()
        return framework

    def said(self, event: str) -> list[int]:
        """Steps of the events of a name."""
        return [each.step for each in self.events if each.name == event]

    def of(self, kind: type[E]) -> list[E]:
        """Events of a kind."""
        return [each for each in self.events if isinstance(each, kind)]


def test_saves_by_steps_and_at_the_end_and_resumes(tmp_path):
    run = Run(tmp_path, every_steps=3, mode="sync")
    run.attempt(Interrupt(8))
    assert run.said("checkpoint_saved") == [3, 6, 8]
    assert run.phases[Phase.CHECKPOINT.name.lower()] > 0
    assert run.attempt().weight[0] == 10
    assert run.said("resumed") == [8] and run.said("checkpoint_saved")[3:] == [9, 10]
    assert run.attempt().weight[0] == 10, "a finished run is loaded, and left alone"
    assert run.said("checkpoint_saved")[5:] == []


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("steps", [7, 12])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, mode, steps):
    """Neither at the end of the run nor when a checkpoint is due before; a new attempt would not help."""
    run = Run(tmp_path, every_steps=4, mode=mode)
    with pytest.raises(NoRequeue, match=r"checkpoint of step \d+ was not written: rank 0: model/weight is not finite"):
        run.attempt(steps=steps, spoiled_at=7)
    (failed,) = run.said("checkpoint_failed")
    assert failed == 8 or (failed == steps and (mode == "async" or steps == 7))
    assert run.store.steps() == [4]


def test_saves_by_epochs(tmp_path):
    run = Run(tmp_path, every_epochs=1, mode="sync")
    run.attempt()
    assert run.said("checkpoint_saved") == [4, 8, 10]


def test_in_the_background_every_announced_one_is_sound(tmp_path):
    run = Run(tmp_path, every_steps=1, keep_last=100)
    run.attempt(steps=200)
    said = run.said("checkpoint_saved")
    assert said[-1] == 200 and run.store.steps() == said
    assert all(run.store.load(step).arrays["model/weight"][0] == step for step in said)


def test_saves_by_the_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_module, "FIRST_S", 0.0)
    monkeypatch.setattr(policy_module, "LEAST_S", 1e9)
    run = Run(tmp_path)
    run.attempt()
    assert len(run.said("checkpoint_saved")) == 2, "one to measure what it costs, and the end"


def test_the_best_one_is_kept(tmp_path):
    losses = {1: 5.0, 2: 4.0, 3: 2.0, 4: 3.0, 5: 9.0, 6: 9.0, 7: float("nan")}
    run = Run(tmp_path, interval="none", best_metric="loss", keep_last=1)
    run.attempt(losses=losses, steps=7)
    assert run.said("checkpoint_saved")[-2:] == [3, 7]
    count = len(run.events)
    assert run.store.steps() == [3, 7] and best_steps(run.store) == {3}
    run.attempt(losses=losses | {8: 9.0, 9: 2.5}, steps=9)
    again = [each.step for each in run.events[count:] if each.name == "checkpoint_saved"]
    assert again == [9], "2.5 is not better than 2.0, which the checkpoint remembers"
    assert run.store.steps() == [3, 9]
    with pytest.raises(UserError, match="'accuracy', which the task does not report"):
        Run(tmp_path / "other", best_metric="accuracy").attempt(losses=losses)


def test_after_a_best_one_that_could_not_be_saved_the_next_best_is(tmp_path, monkeypatch):
    run = Run(tmp_path, interval="none", best_metric="loss", mode="sync")
    fill, free = (
        Interrupt(step, partial(monkeypatch.setattr, saver_module, "LEAST_SPARE_BYTES", spare))
        for step, spare in ((3, 1 << 60), (4, 0))
    )
    run.attempt(fill, free, losses=dict(enumerate([9, 5, 4, 2, 3, 3.5, 9])), steps=6)
    assert run.said("checkpoint_failed") == [3]
    assert run.said("checkpoint_saved") == [1, 2, 4, 6] and best_steps(run.store) == {4}


class HeldDisk(CheckpointStore):
    """Nothing is written before ``free`` is set."""

    free: threading.Event

    def prepare_folder(self, partial: Path) -> None:
        assert self.free.wait(PATIENCE_S), "training waits for the disk"
        super().prepare_folder(partial)


def held(run: Run) -> threading.Event:
    """Holds the disk of a run; set the event to free it."""
    free = threading.Event()
    run.make_store = type("Held", (HeldDisk,), {"free": free})
    return free


def test_an_improvement_while_another_is_in_flight_does_not_wait_for_the_disk(tmp_path):
    run = Run(tmp_path, interval="none", best_metric="loss", keep_last=1)
    free = held(run)
    run.attempt(Interrupt(6, free.set), losses=dict(enumerate([9, 5, 4, 2, 3, 2.5, 9, 9, 9])), steps=8)
    assert run.said("checkpoint_saved") == [1, 3, 8], "the one of step 2 waited, and gave way to a better one"
    assert run.store.load(3).arrays["model/weight"][0] == 3 and best_steps(run.store) == {3}
    assert run.store.steps() == [3, 8]


def test_a_stop_request_gives_up_what_is_in_flight_and_writes_once(tmp_path):
    run = Run(tmp_path, every_steps=2)
    free = held(run)

    def stop():
        Timer(0.5, free.set).start()
        return StopReason.REQUESTED

    run.attempt(Interrupt(5, stop))
    assert run.said("checkpoint_saved") == [5] and run.store.steps() == [5]
    assert run.said("checkpoint_failed") == [], "nothing went wrong"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000005"]


def test_a_stop_request_does_not_cost_the_best_one(tmp_path):
    run = Run(tmp_path, interval="none", best_metric="loss")
    free = held(run)

    def stop():
        Timer(0.5, free.set).start()
        return StopReason.REQUESTED

    run.attempt(Interrupt(5, stop), losses=dict(enumerate([9, 5, 4, 2, 9, 9])))
    assert run.said("checkpoint_saved") == [1, 3, 5] and best_steps(run.store) == {3}


def test_an_error_does_not_wait_until_what_is_in_flight_is_written(tmp_path):
    run = Run(tmp_path, every_steps=4)
    free = held(run)

    def fail():
        Timer(0.5, free.set).start()
        raise RunFailed("it breaks", "repair it")

    with pytest.raises(RunFailed, match="it breaks"):
        run.attempt(Interrupt(5, fail))
    assert [shard.stat().st_size for shard in tmp_path.glob("*/shard-*")] == [0]


def test_saves_that_fail_are_told_by_their_number_and_tried_again_before_they_are_due(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(policy_module, "RETRY_S", 0.0)
    monkeypatch.setattr(saver_module, "LEAST_SPARE_BYTES", 1 << 60)
    run = Run(tmp_path, every_steps=3, mode="sync", overhead_budget=1e9)
    free = Interrupt(8, lambda: monkeypatch.setattr(saver_module, "LEAST_SPARE_BYTES", 0))
    run.attempt(free)
    failed = [(each.step, each.failures) for each in run.of(CheckpointFailed)]
    assert failed == [(step, step - 2) for step in range(3, 8)] and run.said("checkpoint_saved") == [8, 9, 10]
    assert "5 CHECKPOINTS IN A ROW FAILED" in capsys.readouterr().out


def test_another_metric_begins_with_no_best_value(tmp_path):
    run = Run(tmp_path, interval="none", best_metric="loss")
    run.attempt(losses={1: 2.0}, steps=1)
    run.attempt(losses={2: 3.0}, steps=2)
    assert run.said("checkpoint_saved") == [1, 2] and best_steps(run.store) == {1}
    other = Run(tmp_path, interval="none", best_metric="loss", best_mode="max")
    other.identity["config"]["checkpoint"] = {"best_mode": "max"}
    other.attempt(losses={3: 1.0}, steps=3)
    assert best_steps(other.store) == {3}, "1.0 is less than 2.0, but that was the best of another rule"


def test_a_failed_save_is_told_and_training_goes_on(tmp_path, monkeypatch, capsys):
    spare = saver_module.LEAST_SPARE_BYTES
    run = Run(tmp_path, every_steps=2, mode="sync")
    fill = Interrupt(3, lambda: monkeypatch.setattr(saver_module, "LEAST_SPARE_BYTES", 1 << 60))
    free = Interrupt(7, lambda: monkeypatch.setattr(saver_module, "LEAST_SPARE_BYTES", spare))
    assert run.attempt(fill, free).weight[0] == 10
    assert run.said("checkpoint_failed") == [4, 6] and run.said("checkpoint_saved") == [2, 8, 10]
    failed = run.events[1]
    assert isinstance(failed, CheckpointFailed) and "MB are needed" in str(failed.error)
    assert "checkpoint of step 4 FAILED: rank 0: " in capsys.readouterr().out


def test_a_last_save_that_fails_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(saver_module, "LEAST_SPARE_BYTES", 1 << 60)
    run = Run(tmp_path, interval="none")
    with pytest.raises(RunFailed, match="step 10 was not written"):
        run.attempt()
    assert run.said("checkpoint_failed") == [10]


def test_a_replaced_attempt_ends(tmp_path):
    calls = []

    def fence():
        calls.append(1)
        if len(calls) > 2:
            raise Replaced("attempt 1 has been replaced by attempt 2")

    run = Run(tmp_path, every_steps=1, mode="sync")
    with pytest.raises(Replaced, match="replaced by attempt 2"):
        run.attempt(fence=fence)
    assert run.said("checkpoint_saved") == [1, 2] and run.store.steps() == [1, 2]


def test_fresh_puts_the_old_ones_aside(tmp_path):
    run = Run(tmp_path, every_steps=3, mode="sync")
    run.attempt(Interrupt(8))
    Run(tmp_path, seed=1, every_steps=5, mode="sync").attempt(fresh=True)
    assert run.store.steps() == [5, 10]
    assert len(list(tmp_path.glob("superseded-step-*"))) == 3


def test_a_changed_run_file_is_refused_and_nothing_is_touched(tmp_path):
    run = Run(tmp_path)
    run.attempt(Interrupt(8))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match="seed was 0 and is 1"):
        Run(tmp_path, seed=1).attempt()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_store_of_something_else_is_refused(tmp_path):
    with closing(CheckpointStore(tmp_path)) as store:
        store.save({"x": np.zeros(1)})
    with pytest.raises(UserError, match="not from a training run"):
        Run(tmp_path).attempt()


def test_no_memory_for_a_snapshot_is_a_checkpoint_that_failed(tmp_path, monkeypatch):
    def refuse(self, num_bytes):
        raise MemoryError(f"{num_bytes} bytes")

    monkeypatch.setattr(Counter, "staging", refuse, raising=False)
    run = Run(tmp_path, every_steps=3, mode="sync")
    with pytest.raises(RunFailed, match=r"the checkpoint of step 10 was not written: rank 0: \d+ bytes"):
        run.attempt()
    assert run.said("checkpoint_failed") == [3, 6, 9, 10]


class Memory(BaseHook):
    """Remembers every step, in values and in an array."""

    def __init__(self, name: str = "memory") -> None:
        self.steps: list[int] = []
        self.lowest = math.inf
        self.sums = np.zeros(2)
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def after_step(self, training: Any, result: Any) -> None:
        self.steps.append(training.state.step)
        self.sums += training.state.step

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "lowest": self.lowest, "sums": self.sums}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.steps, self.lowest, self.sums = saved["steps"], saved["lowest"], saved["sums"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_state_of_hooks_is_resumed_as_if_nothing_had_happened(tmp_path, mode):
    run, memory = Run(tmp_path, every_steps=2, mode=mode), Memory()
    run.attempt(memory, Interrupt(5))
    saved = run.store.load(4 if mode == "sync" else None)
    assert saved.arrays["hooks/memory/sums"].tolist() == [sum(range(saved.step + 1))] * 2, "as it was at that step"
    resumed = Memory()
    run.attempt(resumed)
    assert resumed.steps == list(range(1, 11)) and resumed.lowest == math.inf
    assert resumed.sums.tolist() == [55.0, 55.0]


def test_declared_state_is_resumed_and_restored_for_an_evaluation(tmp_path, capsys):
    run = Run(tmp_path, every_steps=2, mode="sync", keep_last=10)
    lanes, other = Memory("lanes"), Memory()
    run.attempt(lanes, Interrupt(5), state=kept_state({"lanes": PerRank(other), "level": lanes}))
    assert {"hooks/lanes", "state/lanes", "state/level"} == set(run.store.load().meta["objects"])
    resumed = Memory()
    with pytest.raises(UserError, match="holds state 'level', which the task no longer has"):
        run.attempt(state=kept_state({"lanes": PerRank(resumed)}))
    run.config = dataclasses.replace(run.config, accept=("state.level",))
    run.attempt(state=kept_state({"lanes": PerRank(resumed)}))
    assert "state 'level' is left out, as accepted" in capsys.readouterr().out
    judged = Memory()
    load_weights(Counter(), run.store, 5, kept_state({"level": judged, "unknown": Memory()}))  # type: ignore[arg-type]
    assert judged.steps == lanes.steps == [1, 2, 3, 4, 5] and judged.sums.tolist() == [15, 15]


def test_a_hook_that_is_new_begins_anew_and_one_that_is_gone_is_told(tmp_path, capsys):
    run = Run(tmp_path, every_steps=2)
    run.attempt(Memory("first"), Interrupt(4))
    second = Memory("second")
    run.attempt(second)
    assert second.steps == [5, 6, 7, 8, 9, 10]
    assert "state of hook first is left out: this run has none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        (({"model": object()},), "the state_dict of hook 'memory', model is an object, which cannot be saved"),
        (({"names": np.array(["a"])},), "the state_dict of hook 'memory', names is an ndarray, which cannot be saved"),
        (({"count": 1}, {"count": 2}), "two objects with state are called hook 'memory'"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path, states, problem):
    hooks = [Memory() for _ in states]
    for hook, state in zip(hooks, states, strict=True):
        hook.state_dict = lambda state=state: state  # type: ignore[method-assign]
    with pytest.raises(UserError, match=problem):
        Run(tmp_path).attempt(*hooks)
    assert hooks[0].steps == []


def test_a_checkpoint_that_was_purged_is_told():
    """Training began again without a word."""
    one, two = Attempt(number=1, to_step=64), Attempt(number=2)
    assert gone_since([one, two]) == "the checkpoint of step 64, which attempt 1 left, is gone"
    for fine in ([], [two], [one, dataclasses.replace(two, from_step=32)], [Attempt(number=1), two]):
        assert gone_since(fine) == ""
