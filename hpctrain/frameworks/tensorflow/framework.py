"""Keras 3 models on TensorFlow: one update, evaluation, prediction, and state to and from named arrays."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.comm.world import World
from hpctrain.config.combinations import Feature, refusal
from hpctrain.config.sections import Config
from hpctrain.data import Samples
from hpctrain.errors import UserError
from hpctrain.frameworks.host_random import host_random_state, restore_host_random_state
from hpctrain.frameworks.loss_scale import LossScale
from hpctrain.frameworks.named_state import load_tensors, named_outputs
from hpctrain.frameworks.tensorflow.dry_call import try_evaluation, try_training
from hpctrain.frameworks.tensorflow.flops import training_flops
from hpctrain.frameworks.tensorflow.holdings import Holdings, optimizers_in
from hpctrain.frameworks.tensorflow.leaves import KerasLeaves
from hpctrain.frameworks.tensorflow.metrics import keras_meters, to_host
from hpctrain.frameworks.tensorflow.overrides import evaluates_itself, trains_itself
from hpctrain.frameworks.tensorflow.own_step import OwnStep
from hpctrain.frameworks.tensorflow.passes import Passes, Tensors, Update
from hpctrain.frameworks.tensorflow.sharding import ShardedUpdate
from hpctrain.frameworks.tensorflow.state import (
    VariableTensor,
    digest,
    is_seed,
    model_tensors,
    path_in,
)
from hpctrain.frameworks.tensorflow.step import Judge, Step
from hpctrain.frameworks.tensorflow.sync_batchnorm import SyncBatchNorm
from hpctrain.frameworks.update import NotFinite, UpdateResult, UpdateRule, ranks_at_fault
from hpctrain.parallel.tensorflow_sharded import ShardedReducer, ShardedReducers
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.reduce.tensorflow_reducer import KerasReducers, Reducer
from hpctrain.reduce.tensorflow_sparse import Gradients
from hpctrain.tasks.definition import KerasTask, kept_objects
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.evaluation import try_meters
from hpctrain.train.flops import Flops
from hpctrain.train.framework import HostBatch, Sums
from hpctrain.train.metrics import Meter, Seen
from hpctrain.train.schedule import Factors, OwnRates
from hpctrain.train.seeds import derive, seed_python
from hpctrain.train.state import ArrayTensor, Placement, StateTensor
from hpctrain.train.stateful import unchanged


@dataclass(frozen=True)
class Named:
    """Variables of a task that have names: its model's, what it holds besides, and TensorFlow's noise."""

    model: keras.Model
    holdings: Holdings
    noise: tf.random.Generator
    equal: Sequence[tf.Variable] = ()
    """Of the model's statistics, those that are equal on all ranks."""

    def tensors(self) -> list[VariableTensor]:
        """``model/...``, ``optimizer/...``, ``held/...``, ``rng/...``."""
        noise = VariableTensor("rng/tensorflow", self.noise.state, Placement.RANK)
        return [*model_tensors(self.model, self.equal), *self.holdings.tensors(), noise]


@dataclass(frozen=True)
class ReadyTask:
    """A task whose model and optimizer are equal on all ranks."""

    task: KerasTask
    named: Named
    averages: Sequence[tf.Variable]
    """Of the trainable variables, in float32, as they are at the start; empty without an EMA."""
    travelling: Gradients
    reducers: KerasReducers | ShardedReducers
    reducer: Reducer | None
    """None if it has to be measured."""
    joint: SyncBatchNorm | None = None
    """What joins the statistics of BatchNormalization layers, if that is wanted on several ranks."""


class KerasFramework:
    """Trains, evaluates and predicts with a KerasTask; see train.framework.Framework.

    An update is one TensorFlow function, in which the ranks meet.

    If the reducer has to be measured, that is done on the batch of the first update.
    """

    name = "tensorflow"

    def __init__(self, ready: ReadyTask, world: World, config: Config, clock: StepClock, choice: ReducerChoice) -> None:
        """
        Args:
            ready: see ``open_keras``, which makes one, and of it a framework.
            world, config, clock, choice: see there.
        """
        task, train, variables = ready.task, config.train, ready.task.model.trainable_variables
        self.task, self.world, self.group, self.config, self.clock = task, world, world.data, config, clock
        self.joint = ready.joint
        self.choice, self.reducers, self.reducer = choice, ready.reducers, ready.reducer
        self.travelling, self.named, self.averages = ready.travelling, ready.named, ready.averages
        self.objects, self.leaves = kept_objects(task), KerasLeaves()
        self.own = OwnStep(task, config, self.group, clock, self.averages) if trains_itself(task.model) else None
        """In place of ``passes.gradients``, ``update`` and ``steps``."""
        self.example: HostBatch | None = None
        """A batch for a model's own step on a rank without samples."""
        self.passes = Passes(task, self.travelling, config.reduce.sparse, train.compile, self.averages, ready.joint)
        decay = train.ema_decay or 0.0
        self.update: Update | ShardedUpdate = Update(
            task.optimizer, variables, self.travelling, train.compile, self.averages, decay
        )
        if isinstance(ready.reducer, ShardedReducer):
            given = (task.optimizer, variables, ready.reducer, clock, train.compile, self.averages, decay)
            self.update = ShardedUpdate(*given)
        self.loss_scale = LossScale() if train.precision == "fp16" else None
        self.rule = UpdateRule(train.clip_norm, self.loss_scale)
        self.judge = Judge(clock, self.rule)
        self.meters = keras_meters(task)
        self.steps: Step | None = None
        self.rates = [(one, own_learning_rate(one)) for one in optimizers_in(task.optimizer).values()]
        self.flops: Flops | None = None
        self.factor: float | None = None
        """What the learning rate was multiplied by last."""

    def reseed(self, step: int) -> None:
        rank_seed = derive(self.config.seed, self.group.rank, 1, step)  # dropout must differ between ranks
        seed_python(rank_seed)
        self.named.noise.reset_from_seed(rank_seed)
        for number, variable in enumerate(filter(is_seed, self.task.model.non_trainable_variables)):
            variable.assign([derive(rank_seed, number) % 2**32, 0])
        if step:  # before the first one, the task's own seeds hold
            self.named.holdings.reseed(rank_seed)

    @property
    def meeting(self) -> None:
        return None

    @property
    def reducer_name(self) -> str | None:
        if self.own is not None:
            return self.own.reducer_name
        return self.reducer.name if self.reducer else None

    @property
    def valueless(self) -> frozenset[str]:
        return frozenset()

    @property
    def gives_back(self) -> bool:
        return False

    @property
    def num_layers(self) -> int:
        return 0

    @property
    def gradient_bytes(self) -> int:
        if self.own is not None and self.own.updates is not None:
            return self.own.gradient_bytes
        return 4 * self.travelling.pieces.layout.gradients

    def set_learning_rate(self, factors: Factors) -> None:
        """Keras optimizers have one rate."""
        if isinstance(factors, (Sequence, OwnRates)):
            raise refusal({Feature.KERAS: True, Feature.GROUP_RATES: True})
        factor = factors
        known = [(optimizer, rate) for optimizer, rate in self.rates if rate is not None]
        if len(known) < len(self.rates):
            if factor != 1.0:
                given = Feature.SCHEDULE if self.task.schedule is None else Feature.TASK_SCHEDULE
                raise refusal({Feature.KERAS_SCHEDULE: True, given: True})
        elif factor != self.factor:
            for optimizer, rate in known:
                optimizer.learning_rate.assign(rate * factor)
            self.factor = factor

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        """Forward and backward are one function: their time is all Phase.BACKWARD."""
        if self.own is not None:
            return self._own_step(self.own, micro_batches, global_samples)
        batches = [on_device(batch) for batch in micro_batches]
        self.clock.mark(Phase.TO_DEVICE)
        if self.reducer is None:
            self.reducer = self._measure(batches, global_samples)
        if self.steps is None or self.steps.reducer is not self.reducer:
            self.steps = Step(self.passes, self.update, self.reducer, self.judge)
        try:
            with self._joint_statistics(batches):
                share, scale = self._scalars(global_samples)
                if len(batches) == 1:
                    self._begin_micro_batch(0)
                    told = self.steps.whole(batches[0], share, scale)
                else:
                    told = self.steps.complete(self._gradients(batches, global_samples), scale)
                self.judge.hear(told)
        except (tf.errors.OpError, NotFinite) as error:
            if self.joint is not None and self.joint.statistics.problem is not None:
                raise self.joint.statistics.problem from error
            if isinstance(error, NotFinite) or not self.judge.finite.numpy():
                own = [np.isfinite(np.asarray(piece)).all() for piece in self._gradients(batches, global_samples)]
                raise ranks_at_fault(self.group, bool(all(own))) from error
            raise
        self.clock.mark(Phase.OPTIMIZER)
        loss, weight = self.judge.own
        return UpdateResult((loss * global_samples, weight * global_samples), self.judge.norm)

    def _own_step(self, own: OwnStep, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        """A rank without samples takes part in the exchanges, and leaves its own state as it was."""
        if self.example is None and micro_batches:
            self.example = copied(micro_batches[0])
        if self.example is None:
            what = f"a rank had no sample in its first batch ({global_samples} samples)"
            raise UserError(what, "make train.global_batch larger, or start fewer ranks")
        host = micro_batches[0] if micro_batches else self.example
        batch, samples = on_device(host), samples_of(host) if micro_batches else 0
        self.clock.mark(Phase.TO_DEVICE)
        if own.updates is None:
            own.plan(host)
        if own.reducer_name is None:
            own.open(self.choice)
        with contextlib.nullcontext() if samples else self._unchanged():
            try:
                found = own.run(batch, tf.constant(samples / global_samples, tf.float64))
                logs = {name: float(value) for name, value in found.items()} if samples else {}
            except tf.errors.OpError as error:
                if own.meeting.own_finite is None:
                    raise
                raise ranks_at_fault(self.group, own.meeting.own_finite) from error
        self.clock.mark(Phase.OPTIMIZER)
        sums = {name: (value * samples, float(samples)) for name, value in logs.items()}
        return UpdateResult(sums.get("loss") or next(iter(sums.values()), (0.0, 0.0)), None, sums)

    def _measure(self, batches: Sequence[Tensors], global_samples: int) -> Reducer:
        """The reducer that is fastest on these batches; rehearsals leave the model as it was."""
        sums: dict[int, Callable[..., Any]] = {}

        def rehearse(reducer: Reducer) -> None:
            add_up = sums.setdefault(id(reducer), tf.function(reducer.sum, autograph=False))
            with self._joint_statistics(batches):
                _, pieces = self.travelling.apart(self._gradients(batches, global_samples))
                np.asarray(add_up(pieces)[-1])  # waits for a device

        with self._unchanged():
            return self.choice.measured(self.reducers, rehearse)

    def _joint_statistics(self, batches: Sequence[Tensors]) -> contextlib.AbstractContextManager[None]:
        """BatchNormalization in an update: over the samples of all ranks, if that is wanted."""
        return self.joint.update(len(batches)) if self.joint else contextlib.nullcontext()

    def _begin_micro_batch(self, index: int) -> None:
        if self.joint is not None:
            self.joint.statistics.begin_micro_batch(index)

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """What forward passes in the body change is put back."""
        equal = {id(variable) for variable in self.named.equal}
        known = self._variables()
        changed = [one for one in known if one.placement is Placement.RANK or id(one.variable) in equal]
        before = [np.array(tensor.host_view()) for tensor in changed]
        random = {name: np.array(array) for name, array in host_random_state().items()}
        try:
            with unchanged(self.objects, self.leaves):
                yield
        finally:
            for tensor, value in zip(changed, before, strict=True):
                tensor.assign(value)
            restore_host_random_state(random)

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = ()) -> None:
        if self.own is not None:
            self.example = copied(batch)
            self.own.plan(self.example)
            if self.task.validation is None or evaluates_itself(self.task.model):
                return
        with self._unchanged():
            try_training(self.task, self.passes, on_device(copied(batch)))
            if self.own is None:
                self.flops = training_flops(self.task, self.passes, on_device(copied(batch)))
            for held_out in (validation or [batch]) if self.task.validation is not None else ():
                try_evaluation(self.task, self.passes, on_device(copied(held_out)))
                try_meters(self, copied(held_out))

    def _gradients(self, batches: Sequence[Tensors], global_samples: int) -> list[tf.Tensor]:
        """This rank's contribution; zeros if its part of the batch is empty."""
        tensors: list[tf.Tensor] = []
        for index, batch in enumerate(batches):
            self._begin_micro_batch(index)
            more = self.passes.gradients(batch, *self._scalars(global_samples))
            tensors = self.travelling.added(tensors, more) if tensors else more
        return tensors or self.travelling.zeros()

    def _scalars(self, global_samples: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Each sample's share, and the loss scale."""
        return float64(1.0 / global_samples), float64(self.rule.scale)

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        """With the averaged weights if an EMA is kept."""
        inputs = on_device(batch)
        found, outputs = self.passes.evaluate(inputs)
        seen = Seen(outputs, inputs, batch, to_host)
        for meter in meters:
            meter.update(seen)
        return {name: (float(total), float(weight)) for name, (total, weight) in found.items()}

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        """A list of outputs is named ``output_0``, ``output_1``, and so on."""
        outputs = named_outputs(self.passes.predict(on_device(batch)))
        return {name: np.asarray(value) for name, value in outputs.items()}

    def state(self) -> list[StateTensor]:
        """``model/...``, ``optimizer/...``, ``ema/...``, ``scaler/scale``, ``rng/...``."""
        scaler = self.loss_scale.tensors() if self.loss_scale else []
        host = [ArrayTensor(name, array, Placement.RANK) for name, array in host_random_state().items()]
        return [*self._variables(), *scaler, *host]

    def _variables(self) -> list[VariableTensor]:
        model = self.task.model
        paths = [path_in(model, variable) for variable in model.trainable_variables]
        averages = [VariableTensor(f"ema/{path}", value) for path, value in zip(paths, self.averages, strict=False)]
        return [*self.named.tensors(), *averages]

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Each rank's own state may be missing (another number of ranks): it then keeps what it has."""
        self.named.holdings.refuse_strangers(arrays)
        load_tensors(self._variables(), arrays)
        if self.loss_scale:
            self.loss_scale.load(arrays)
        restore_host_random_state(arrays)
        if self.joint:  # each rank may have had its own when they were saved
            self.joint.follow()
        self.factor = None  # the rates of the run file hold, not the saved ones

    def begin_averages(self) -> None:
        """Averages begin at the weights as they are now."""
        for average, variable in zip(self.averages, self.task.model.trainable_variables, strict=bool(self.averages)):
            average.assign(tf.cast(variable.value, tf.float32))

    def place(self, samples: Samples) -> Samples:
        """TensorFlow copies by itself."""
        return samples

    @property
    def other_names(self) -> Mapping[str, str]:
        """Keras gives a shared variable once."""
        return {}

    def staging(self, num_bytes: int) -> NDArray[np.uint8]:
        """Written to, so that the first snapshot does not pay for it."""
        return np.full(num_bytes, 0, np.uint8)

    def synchronize(self) -> None:
        """Copies are complete when ``copy_into`` returns."""

    def weights_hash(self, shared_only: bool = False) -> str:
        tensors = model_tensors(self.task.model, self.named.equal)
        return digest([tensor for tensor in tensors if tensor.placement is Placement.REPLICATED])

    def close(self) -> None:
        if self.own is not None:
            self.own.close()
        if self.reducer:
            self.reducer.close()
            self.reducer = self.steps = None
        self.travelling.close()
        if self.joint:
            self.joint.close()
            self.joint = None


def on_device(batch: HostBatch) -> dict[str, tf.Tensor]:
    """A host batch as tensors in memory of their own: a variable of the model that is assigned one keeps it.

    For a process in which TensorFlow has begun, as models have it begin. 2 us for each, where tf.constant takes 10.
    """
    return {name: tf.__internal__.EagerTensor(array.copy(), None, None) for name, array in batch.items()}


@functools.lru_cache(maxsize=8)
def float64(value: float) -> tf.Tensor:
    """A scalar; most steps need the same ones."""
    return tf.constant(value, tf.float64)


def copied(batch: HostBatch) -> dict[str, NDArray[Any]]:
    """A batch in memory of its own."""
    return {name: np.array(array) for name, array in batch.items()}


def samples_of(batch: HostBatch) -> int:
    """How many samples a batch has."""
    return len(next(iter(batch.values())))


def own_learning_rate(optimizer: keras.optimizers.Optimizer) -> float | None:
    """The number an optimizer was made with, or None if a Keras schedule sets its learning rate."""
    if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        return None
    return float(optimizer.learning_rate)
