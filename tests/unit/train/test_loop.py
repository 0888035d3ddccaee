"""The loop, on a framework of a few lines of NumPy: what it calls, in which order, and where it ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.step_vote import Ballot
from hpctrain.comm.world import alone
from hpctrain.config.sections import EarlyStopConfig, PlateauConfig, TrainConfig
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData, ValidationData
from hpctrain.data.stream import StreamingData, StreamOrder, open_stream
from hpctrain.data.tokens import token_counter
from hpctrain.errors import ExitCode, NoRequeue, UserError
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import Train, decode
from hpctrain.track.events_hook import EventsHook
from hpctrain.train.clock import IntervalClock, Phase
from hpctrain.train.framework import HostBatch, NonFiniteLoss, StepResult, Sums
from hpctrain.train.hooks import BaseHook, Hook, StopReason
from hpctrain.train.loop import Trainer
from hpctrain.train.metrics import Meter
from hpctrain.train.schedule import duration_of, global_batch
from hpctrain.train.state import ArrayTensor, StateTensor, TrainState
from hpctrain.train.watchers import EarlyStop, Plateau, improves
from tests.support.fake_framework import FakeFramework
from tests.support.thread_groups import in_threads


class Result:
    """A loss that is there already."""

    def __init__(self, loss: float, weight: float) -> None:
        self.pair = (loss * weight, weight)

    def sums(self) -> Sums:
        return {"loss": self.pair}


class LeastSquares(FakeFramework):
    """y = x w, by gradient descent."""

    def __init__(self) -> None:
        self.weights = np.zeros(3)
        self.factor = 1.0
        self.seen: list[int] = []

    def set_learning_rate(self, factor: float) -> None:
        self.factor = factor

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        gradient, loss = np.zeros(3), 0.0
        for batch in micro_batches:
            error = batch["x"] @ self.weights - batch["y"]
            gradient += batch["x"].T @ error / global_samples
            loss += float(error @ error) / global_samples
            self.seen += batch["id"].tolist()
        if not np.isfinite(loss):
            raise NonFiniteLoss([0])
        self.weights -= 0.5 * self.factor * gradient
        return Result(loss, global_samples)

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        error = batch["x"] @ self.weights - batch["y"]
        return {"loss": (float(error @ error), len(error))}

    def predict(self, batch: HostBatch) -> dict[str, np.ndarray[Any, Any]]:
        return {"output": batch["x"] @ self.weights}

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self.weights = arrays["weights"]

    def weights_hash(self) -> str:
        return self.weights.tobytes().hex()


class Recorder(BaseHook):
    """Writes down what it is told, and stops at a step if asked to."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.evaluations: list[tuple[int, float]] = []
        self.stop_at = stop_at

    def before_fit(self, trainer: Trainer) -> None:
        self.calls.append("before")

    def after_step(self, trainer: Trainer, result: StepResult) -> StopReason | None:
        self.calls.append(f"step {trainer.state.step}")
        return StopReason.REQUESTED if trainer.state.step == self.stop_at else None

    def after_eval(self, trainer: Trainer, metrics: Mapping[str, float]) -> StopReason | None:
        self.calls.append(f"eval {trainer.state.step}")
        self.evaluations.append((trainer.state.step, metrics["loss"]))
        return None

    def after_fit(self, trainer: Trainer, reason: StopReason) -> None:
        self.calls.append(reason.value)


def arrays(samples: int = 10) -> dict[str, np.ndarray[Any, Any]]:
    x = np.random.default_rng(1).normal(size=(samples, 3))
    return {"x": x, "y": x @ np.array([1.0, -2.0, 3.0]), "id": np.arange(samples)}


def make(config: TrainConfig, hooks: Sequence[Hook], state: TrainState | None = None, data: Any = None) -> Trainer:
    dataset = open_dataset(data or arrays())
    order = Order(len(dataset), global_batch(config, 1), seed=3)
    return Trainer(
        world=alone(),
        framework=LeastSquares(),
        data=TrainingData(dataset, order, 0, 1, accumulate=config.accumulate, prefetch=0),
        validation={"validation": ValidationData(dataset, 4, 0, 1, prefetch=0)},
        schedule=lambda step: 1.0,
        plan=duration_of(config, order.batches_per_epoch),
        clock=IntervalClock(),
        hooks=hooks,
        state=state or TrainState(),
    )


def test_an_epoch_sees_every_sample_once_and_evaluates_at_its_end():
    recorder = Recorder()
    trainer = make(TrainConfig(epochs=2, global_batch=4), [recorder])
    summary = trainer.fit()
    assert (summary.reason, summary.step) == (StopReason.COMPLETED, 6)
    assert recorder.calls[:6] == ["before", "step 1", "step 2", "eval 3", "step 3", "step 4"]
    assert recorder.calls[-1] == "completed"
    seen = trainer.framework.seen  # type: ignore[attr-defined]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert trainer.state == TrainState(step=6, epoch=2, batch=0, samples=20)


def test_ranks_whose_streams_do_not_end_together_stop_in_that_step():
    streams = [open_stream([{"x": np.ones(3), "y": 1.0, "id": row} for row in range(length)]) for length in (24, 20)]

    def train(group: Group) -> str:
        trainer = make(TrainConfig(steps=50, global_batch=4), [])
        trainer.world = dataclasses.replace(alone(), everyone=group)
        trainer.ballot = Ballot(group)
        trainer.data = StreamingData(streams[group.rank], StreamOrder(4), 0, 1, prefetch=0)
        with pytest.raises(UserError) as caught:
            trainer.fit()
        return caught.value.what

    what = "the stream gave rank 1 other samples than rank 0 in step 5, where the stream of some ranks ends"
    assert in_threads(2, train) == [what] * 2


def test_it_learns():
    trainer = make(TrainConfig(steps=1000, global_batch=5), [])
    trainer.fit()
    assert trainer.framework.weights == pytest.approx([1, -2, 3], abs=1e-6)  # type: ignore[attr-defined]


def test_evaluations_by_steps_and_always_at_the_end():
    recorder = Recorder()
    make(TrainConfig(steps=7, global_batch=4, eval_every_epochs=None, eval_every_steps=3), [recorder]).fit()
    assert [step for step, _ in recorder.evaluations] == [3, 6, 7]


def test_a_hook_stops_the_run_and_all_hooks_hear_of_it():
    first, second = Recorder(stop_at=2), Recorder()
    trainer = make(TrainConfig(epochs=2, global_batch=4), [first, second])
    assert trainer.fit().reason is StopReason.REQUESTED
    assert second.calls == ["before", "step 1", "step 2", "stop_requested"]


def test_a_stop_at_the_very_last_step_comes_too_late():
    """The run is complete, and a job that ended with 75 would be started again for nothing."""
    recorder = Recorder(stop_at=3)
    trainer = make(TrainConfig(steps=3, global_batch=4), [recorder])
    assert trainer.fit().reason is StopReason.COMPLETED
    assert recorder.calls[-1] == "completed"
    assert trainer.is_asked_to_stop  # hooks that wait for a store at the end wait briefly


def test_going_on_from_a_state_ends_where_the_whole_run_ends():
    config = TrainConfig(epochs=2, global_batch=4, accumulate=2)
    whole = make(config, [])
    whole.fit()
    part = make(config, [Recorder(stop_at=4)])
    part.fit()
    saved = TrainState()
    saved.restore(part.state.to_json())
    rest = make(config, [], saved)
    rest.framework.load({"weights": part.framework.weights})  # type: ignore[attr-defined]
    rest.fit()
    assert rest.framework.weights_hash() == whole.framework.weights_hash()
    assert part.framework.seen + rest.framework.seen == whole.framework.seen  # type: ignore[attr-defined]


def test_a_finished_state_trains_no_further():
    trainer = make(TrainConfig(steps=3, global_batch=4), [Recorder()], TrainState(step=3, batch=0, epoch=1))
    assert trainer.fit().step == 3
    assert trainer.framework.seen == []  # type: ignore[attr-defined]


def test_a_loss_that_is_not_finite_names_step_rank_and_samples():
    data = arrays()
    data["y"][7] = np.nan
    with pytest.raises(NoRequeue) as caught:
        make(TrainConfig(epochs=1, global_batch=1), [], data=data).fit()
    position = Order(10, 1, seed=3)
    step = next(index for index in range(10) if position.batch_indices(0, index)[0] == 7)
    assert f"step {step + 1}, epoch 0, batch {step} (rank 0, samples 7)" in caught.value.what
    assert caught.value.exit_code == ExitCode.DO_NOT_REQUEUE


class Spoiling(LeastSquares):
    """Its weights are not finite after an update, or its gradient is not, as ``clip_norm`` finds."""

    def __init__(self, after: int, what: str) -> None:
        super().__init__()
        self.after, self.what, self.updates = after, what, 0

    def state(self) -> Sequence[StateTensor]:
        return [ArrayTensor("model/weights", self.weights, is_trained=True)]

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        self.updates += 1
        if self.updates > self.after and self.what == "the gradient":
            raise NonFiniteLoss([], self.what)
        found = super().step(micro_batches, global_samples)
        if self.updates == self.after and not self.what:
            self.weights[1] = np.nan
        return found


@pytest.mark.parametrize(
    ("after", "what", "said"),
    [
        (2, "", r"model/weights was not finite before step 3: the gradient of step 2 was not finite"),
        (1, "", r"model/weights was not finite before step 2: the gradient of step 1 was not finite"),
        (0, "", r"model/weights was not finite before step 1: from the start"),
        (2, "the gradient", r"the gradient is not finite at step 3, epoch 0, batch 2, though the loss is"),
    ],
)
def test_samples_are_not_blamed_for_a_gradient(after, what, said):
    trainer = make(TrainConfig(epochs=1, global_batch=2), [])
    trainer.framework = Spoiling(after, what)  # type: ignore[assignment]
    if not after:
        trainer.framework.weights[0] = np.nan
    with pytest.raises(NoRequeue, match=f"(?s){said}.*roots, logarithms.*train.clip_norm") as caught:
        trainer.fit()
    assert "samples" not in str(caught.value)


def test_early_stop_after_patience_evaluations_without_improvement():
    stop = EarlyStop(EarlyStopConfig(metric="loss", patience=2, min_delta=1e9))
    trainer = make(TrainConfig(epochs=50, global_batch=4), [stop])
    assert trainer.fit().reason is StopReason.EARLY
    assert trainer.state.epoch == 3, "the first evaluation is the best; two more do not improve on it"


def test_a_run_that_stopped_early_stays_ended_until_it_is_given_more_patience():
    config = TrainConfig(epochs=50, global_batch=4)
    saved = {"metric": "loss", "mode": "min", "best": 1.0, "evaluations_since_best": 2}

    def resumed(patience, **watched):
        stop = EarlyStop(EarlyStopConfig(**{"metric": "loss", **watched}, patience=patience, min_delta=1e9))
        stop.load_state_dict(saved)
        return make(config, [stop], TrainState(step=9, epoch=3))

    again, patient, other = resumed(2), resumed(3), resumed(2, mode="max")
    assert (again.fit().reason, again.state.step) == (StopReason.EARLY, 9)
    assert (patient.fit().reason, patient.state.step) == (StopReason.EARLY, 12)
    assert (other.fit().reason, other.state.step) == (StopReason.EARLY, 18), "the count of another rule is not taken"


def test_a_plateau_lowers_the_rate_after_patience_and_counts_again_after_the_cooldown():
    def follow(plateau, losses):
        trainer, found = make(TrainConfig(epochs=1, global_batch=4), [plateau]), []
        for loss in losses:
            assert plateau.after_eval(trainer, {"loss": loss}) is None
            found.append(plateau.adjusted(lambda step: 2.0)(0))
        return found

    config = PlateauConfig(patience=2, factor=0.25, cooldown=1)
    plateau = Plateau(config, lowest=0.125)
    assert follow(plateau, [3.0, 3.0, 2.0, 2.0, 2.0]) == [2.0, 2.0, 2.0, 2.0, 0.5]
    resumed = Plateau(config, lowest=0.125)
    resumed.load_state_dict(plateau.state_dict())
    for each in (plateau, resumed):
        assert follow(each, [2.5, 2.0, 2.0, 1.0, 1.0]) == [0.5, 0.5, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(("mode", "better", "worse"), [("min", 0.5, 1.5), ("max", 1.5, 0.5)])
def test_lower_values_improve_in_mode_min_and_higher_ones_in_mode_max(mode, better, worse):
    config = EarlyStopConfig(metric="x", mode=mode, min_delta=0.25)  # type: ignore[arg-type]
    assert improves(better, 1.0, config) and not improves(worse, 1.0, config)
    assert not improves((1 + better) / 2, 1.0, config), "it has to be more than min_delta"
    assert improves(worse, None, config) and not improves(np.nan, None, config)


def test_hooks_may_be_saved_once_all_of_them_have_seen_the_step():
    class Order(BaseHook):
        def after_step(self, training, result):
            calls.append("after")

        def after_epoch(self, training):
            calls.append(f"epoch {training.state.epoch}")

        def after_hooks(self, training):
            calls.append("end")

    calls: list[str] = []
    trainer = make(TrainConfig(epochs=2, global_batch=4), [Order(), Order()])
    trainer.fit()
    steps = trainer.state.step // 2
    assert steps > 1
    expected: list[str] = []
    for number in (1, 2):
        expected += ["after", "after", "end", "end"] * (steps - 1)
        expected += ["after", "after", f"epoch {number}", f"epoch {number}", "end", "end"]
    assert calls == expected


def test_an_epoch_may_end_the_run():
    class OneEpoch(BaseHook):
        def after_epoch(self, training):
            return StopReason.EARLY

    trainer = make(TrainConfig(epochs=3, global_batch=4), [OneEpoch()])
    assert trainer.fit().reason is StopReason.EARLY
    assert (trainer.state.epoch, trainer.state.batch) == (1, 0)


def test_early_stop_on_a_metric_that_is_not_there():
    with pytest.raises(UserError, match="accuracy"):
        make(TrainConfig(epochs=1, global_batch=4), [EarlyStop(EarlyStopConfig(metric="accuracy"))]).fit()


def test_a_global_batch_smaller_than_the_ranks_is_refused():
    with pytest.raises(UserError, match="4 ranks"):
        global_batch(TrainConfig(epochs=1, global_batch=3), 4)
    assert global_batch(TrainConfig(epochs=1, batch_per_rank=3), 4) == 12


def test_ranks_that_share_out_models_are_told_as_groups():
    """Eight ranks in groups of two need four samples, and six of them could share out three."""
    with pytest.raises(UserError, match="4 groups of 2 ranks") as caught:
        global_batch(TrainConfig(epochs=1, global_batch=3), 4, 2)
    assert "set train.global_batch to 4" in caught.value.fix and "at most 6 ranks" in caught.value.fix


def test_the_interval_clock_gives_each_phase_its_time_once():
    clock = IntervalClock()
    for phase in (Phase.DATA, Phase.FORWARD, Phase.DATA):
        clock.mark(phase)
    taken = clock.take()
    assert taken["data"] > 0 and taken["forward"] > 0 and taken["backward"] == 0
    assert sum(clock.take().values()) == 0


def test_tokens_are_a_ranks_work_and_are_reported_per_second(tmp_path):
    clock = IntervalClock()
    works: list[float] = []
    clock.end_step = works.append  # type: ignore[assignment,method-assign]
    hook = EventsHook(EventWriter(tmp_path / "events.jsonl", print), clock, 3)
    trainer = make(TrainConfig(epochs=1, global_batch=4, accumulate=2), [hook], data={**arrays(), "mask": MASK})
    trainer.clock, trainer.count_tokens = clock, token_counter("mask", trainer.data)
    began = time.time()
    trainer.fit()
    assert sum(works) == trainer.tokens == MASK.sum() and len(works) == 3
    (event,) = [one for one in decode((tmp_path / "events.jsonl").read_bytes()) if isinstance(one, Train)]
    assert event.tokens_per_s is not None and event.tokens_per_s > MASK.sum() / (time.time() - began)
    assert event.samples_per_s is not None
    assert event.tokens_per_s / event.samples_per_s == pytest.approx(MASK.sum() / len(MASK))
    assert "tokens/s" in event.rate() and event.numbers()["tokens_per_s"] == event.tokens_per_s


MASK = np.arange(10)[:, None] > np.arange(4)
"""Samples of up to four tokens."""
