"""Keras 3 models on TensorFlow: one update, evaluation, prediction, and state to and from named arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.comm.world import World
from hpctrain.config.sections import Config
from hpctrain.data import Samples
from hpctrain.errors import UserError
from hpctrain.frameworks.host_random import host_random_state, restore_host_random_state
from hpctrain.frameworks.loss_scale import LossScale
from hpctrain.frameworks.tensorflow.dry_call import try_batch
from hpctrain.frameworks.tensorflow.holdings import Holdings, optimizers_in
from hpctrain.frameworks.tensorflow.passes import Passes, Tensors, Update
from hpctrain.frameworks.tensorflow.runtime import POLICIES, require_own_gpu
from hpctrain.frameworks.tensorflow.state import (
    VariableTensor,
    digest,
    is_seed,
    load_tensors,
    model_tensors,
    path_in,
    require_same_model,
)
from hpctrain.frameworks.tensorflow.step import Judge, Step
from hpctrain.reduce.choice import Choice
from hpctrain.reduce.tensorflow_pieces import Pieces
from hpctrain.reduce.tensorflow_reducer import Reducer, broadcast, measured_reducer, open_reducer, possible
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.framework import HostBatch, NonFiniteLoss, Sums
from hpctrain.train.schedule import Factors, OwnRates
from hpctrain.train.seeds import derive, seed_python
from hpctrain.train.state import ArrayTensor, Placement, StateTensor

SCALER = "scaler/scale"


@dataclass(frozen=True)
class KerasStepResult:
    """What one update gave."""

    loss: tuple[float, float]
    """This rank's (sum, weight)."""
    grad_norm: float
    """L2 norm of the averaged gradient before clipping."""

    def sums(self) -> Sums:
        """See StepResult."""
        return {"loss": self.loss, "grad_norm": (self.grad_norm, 1.0)}


class KerasFramework:
    """Trains, evaluates and predicts with a KerasTask; see train.framework.Framework.

    An update is one TensorFlow function, in which the ranks meet.

    Where ``auto`` has a choice, the reducer is made with the first update: it measures on its batch. Before that, set
    ``chosen_reducer`` to keep an earlier choice, ``announce`` to hear of a new one.
    """

    name = "tensorflow"

    def __init__(self, task: KerasTask, world: World, config: Config, clock: StepClock) -> None:
        """Makes the model and its optimizer equal on all ranks. Collective.

        Raises:
            UserError: Keras runs on another backend, TensorFlow began before this rank had chosen its GPU, the ranks'
                models differ, or the reducer that the configuration names cannot be had.
        """
        refuse_what_cannot_work(task, config, world.data.size)
        require_own_gpu(world.local_size)
        self.task = task
        self.world = world
        self.group = world.data
        self.config = config
        self.clock = clock
        variables = task.model.trainable_variables
        self.pieces = Pieces(variables)
        self.passes = Passes(task, self.pieces, config.reduce.sparse, config.train.compile)
        self.update = Update(task.optimizer, variables, self.pieces, config.train.compile)
        self.loss_scale = LossScale() if config.train.precision == "fp16" else None
        self.judge = Judge(clock, config.train.clip_norm, self.loss_scale)
        self.steps: Step | None = None
        self.reducer: Reducer | None = None
        self.chosen_reducer: str | None = None
        self.announce: Callable[[Choice], None] | None = None
        among = possible(config.reduce, world)
        if len(among) == 1:
            self.reducer = open_reducer(among[0], self.group, self.pieces)
            self.chosen_reducer = among[0].name
        self.rates = [(one, own_learning_rate(one)) for one in optimizers_in(task.optimizer).values()]
        self.factor: float | None = None
        """What the learning rate was multiplied by last."""
        self.noise = tf.random.get_global_generator()
        task.optimizer.build(variables)
        others = {"loss": task.loss, "forward": task.forward}
        self.holdings = Holdings(task.optimizer, others, task.model, [self.noise.state])
        self._make_equal()

    def _make_equal(self) -> None:
        """Weights and optimizer as rank 0 has them; noise of each rank's own."""
        tensors = self._variables()
        require_same_model(self.group, tensors)
        broadcast(self.group, [tensor.variable for tensor in tensors], "receive the model")
        if self.config.train.ema_decay is not None:
            self.update.keep_average(self.config.train.ema_decay)
            self.passes.averages = self.update.averages
        self.reseed(0)

    def reseed(self, step: int) -> None:
        """See Framework."""
        rank_seed = derive(self.config.seed, self.group.rank, 1, step)  # dropout must differ between ranks
        seed_python(rank_seed)
        self.noise.reset_from_seed(rank_seed)
        for number, variable in enumerate(filter(is_seed, self.task.model.non_trainable_variables)):
            variable.assign([derive(rank_seed, number) % 2**32, 0])
        if step:  # before the first one, the task's own seeds hold
            self.holdings.reseed(rank_seed)

    @property
    def gradient_bytes(self) -> int:
        """See Framework."""
        return 4 * self.pieces.layout.gradients

    def set_learning_rate(self, factors: Factors) -> None:
        """See Framework. Keras optimizers have one rate."""
        if isinstance(factors, (Sequence, OwnRates)):
            fix = "return one number: a Keras optimizer has one learning rate"
            raise UserError("the task's schedule gives a factor for each parameter group", fix)
        factor = factors
        known = [(optimizer, rate) for optimizer, rate in self.rates if rate is not None]
        if len(known) < len(self.rates):
            if factor != 1.0:
                raise UserError(
                    f"both the {'run file' if self.task.schedule is None else 'task'}'s schedule and the Keras "
                    "optimizer's own change the learning rate",
                    "give the optimizer a number as its learning rate, or leave the schedule to it",
                )
        elif factor != self.factor:
            for optimizer, rate in known:
                optimizer.learning_rate.assign(rate * factor)
            self.factor = factor

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> KerasStepResult:
        """See Framework. Forward and backward are one function: their time is all Phase.BACKWARD."""
        batches = [on_device(batch) for batch in micro_batches]
        self.clock.mark(Phase.TO_DEVICE)
        if self.reducer is None:
            self.reducer = self._measure(batches, global_samples)
        if self.steps is None or self.steps.reducer is not self.reducer:
            self.steps = Step(self.passes, self.update, self.reducer, self.judge)
        try:
            if len(batches) == 1:
                self.steps.whole(batches[0], *self._scalars(global_samples))
            else:
                self.steps.complete(self._gradients(batches, global_samples))
        except tf.errors.OpError as error:
            if self.judge.stopped:
                raise NonFiniteLoss(self._ranks_at_fault(batches, global_samples)) from error
            raise
        self.clock.mark(Phase.OPTIMIZER)
        loss, weight = self.judge.own
        return KerasStepResult((loss * global_samples, weight * global_samples), self.judge.norm)

    def _measure(self, batches: Sequence[Tensors], global_samples: int) -> Reducer:
        """The reducer that was chosen before, or is fastest on these batches; rehearsals leave the model as it was."""
        sums: dict[int, Callable[..., Any]] = {}

        def rehearse(reducer: Reducer) -> None:
            add_up = sums.setdefault(id(reducer), tf.function(reducer.sum, autograph=False))
            np.asarray(add_up(self._gradients(batches, global_samples))[-1])  # waits for a device

        with self._unchanged():
            return measured_reducer(
                self.config.reduce, self.world, self.pieces, rehearse, self.chosen_reducer, self.announce
            )

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """What forward passes in the body change is put back."""
        changed = [tensor for tensor in self._variables() if tensor.placement is Placement.RANK]
        before = [np.array(tensor.host_view()) for tensor in changed]
        random = {name: np.array(array) for name, array in host_random_state().items()}
        try:
            yield
        finally:
            for tensor, value in zip(changed, before, strict=True):
                tensor.assign(value)
            restore_host_random_state(random)

    def dry_call(self, batch: HostBatch) -> None:
        """See Framework."""
        with self._unchanged():
            try_batch(self.task, self.passes, on_device({name: np.array(array) for name, array in batch.items()}))

    def _gradients(self, batches: Sequence[Tensors], global_samples: int) -> list[tf.Tensor]:
        """This rank's contribution; zeros where its part of the batch is empty."""
        pieces: list[tf.Tensor] = []
        for batch in batches:
            more = self.passes.gradients(batch, *self._scalars(global_samples))
            pieces = [old + new for old, new in zip(pieces, more, strict=True)] if pieces else more
        return pieces or self.pieces.zeros()

    def _scalars(self, global_samples: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Each sample's share, and the loss scale."""
        numbers = (1.0 / global_samples, self.loss_scale.factor if self.loss_scale else 1.0)
        return tf.constant(numbers[0], tf.float64), tf.constant(numbers[1], tf.float64)

    def _ranks_at_fault(self, batches: Sequence[Tensors], global_samples: int) -> list[int]:
        own = [np.isfinite(np.asarray(piece)).all() for piece in self._gradients(batches, global_samples)]
        finite = self.group.allgather(bool(all(own)), "find the rank whose loss is not finite")
        return [rank for rank, fine in enumerate(finite) if not fine]

    def evaluate(self, batch: HostBatch) -> Sums:
        """See Framework; with the averaged weights where an EMA is kept."""
        found = self.passes.evaluate(on_device(batch))
        return {name: (float(total), float(weight)) for name, (total, weight) in found.items()}

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        """See Framework. A list of outputs is named ``output_0``, ``output_1``, and so on."""
        outputs = self.passes.predict(on_device(batch))
        if isinstance(outputs, Mapping):
            return {name: np.asarray(value) for name, value in outputs.items()}
        if isinstance(outputs, (tuple, list)):
            return {f"output_{index}": np.asarray(value) for index, value in enumerate(outputs)}
        return {"output": np.asarray(outputs)}

    def state(self) -> list[StateTensor]:
        """See Framework. ``model/...``, ``optimizer/...``, ``ema/...``, ``scaler/scale``, ``rng/...``."""
        scaler = [ArrayTensor(SCALER, self.loss_scale.state)] if self.loss_scale else []
        host = [ArrayTensor(name, array, Placement.RANK) for name, array in host_random_state().items()]
        return [*self._variables(), *scaler, *host]

    def _variables(self) -> list[VariableTensor]:
        model = self.task.model
        paths = [path_in(model, variable) for variable in model.trainable_variables]
        averages = [
            VariableTensor(f"ema/{path}", value) for path, value in zip(paths, self.update.averages, strict=False)
        ]
        return [
            *model_tensors(model),
            *self.holdings.tensors(),
            *averages,
            VariableTensor("rng/tensorflow", self.noise.state, Placement.RANK),
        ]

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """See Framework. Each rank's own state may be missing (another number of ranks): it then keeps what it has."""
        self.holdings.refuse_strangers(arrays)
        load_tensors(self._variables(), arrays)
        if self.loss_scale and SCALER in arrays:
            self.loss_scale.state[:] = arrays[SCALER]
        restore_host_random_state(arrays)
        self.factor = None  # the rates of the run file hold, not the saved ones

    def place(self, samples: Samples) -> Samples:
        """See Framework: TensorFlow copies by itself."""
        return samples

    def synchronize(self) -> None:
        """See Framework: copies are complete when ``copy_into`` returns."""

    def weights_hash(self) -> str:
        """See Framework."""
        return digest([tensor for tensor in model_tensors(self.task.model) if tensor.placement is Placement.REPLICATED])

    def close(self) -> None:
        """See Framework."""
        if self.reducer:
            self.reducer.close()
            self.reducer = self.steps = None


def on_device(batch: HostBatch) -> dict[str, tf.Tensor]:
    """A host batch as tensors; on a CPU they may share the arrays' memory."""
    return {name: tf.convert_to_tensor(array) for name, array in batch.items()}


def own_learning_rate(optimizer: keras.optimizers.Optimizer) -> float | None:
    """The number an optimizer was made with, or None where a Keras schedule sets its learning rate."""
    if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        return None
    return float(optimizer.learning_rate)


def refuse_what_cannot_work(task: KerasTask, config: Config, ranks: int) -> None:
    """Raises UserError where training could not work, or would not do what it says."""
    if keras.backend.backend() != "tensorflow":
        raise UserError(
            f"Keras runs on {keras.backend.backend()}, but Keras tasks train on TensorFlow",
            "set KERAS_BACKEND=tensorflow in the environment of the run, or leave it out",
        )
    if not task.model.built:
        raise UserError("the Keras model has no weights yet", "begin it with keras.Input(shape), or call it on a batch")
    if not task.model.trainable_variables:
        raise UserError("the Keras model has no weight to train", "leave some layers trainable")
    if isinstance(task.optimizer, keras.optimizers.LossScaleOptimizer):
        raise UserError(
            "the optimizer is a LossScaleOptimizer",
            "give the inner one: train.precision: fp16 scales the loss by itself",
        )
    for layer in task.model._flatten_layers():
        if ranks > 1 and isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise UserError(
                f"{layer.path} has synchronized=True, but statistics are each rank's own",
                "leave synchronized out, or use GroupNormalization or LayerNormalization, which need no other rank",
            )
    policy = POLICIES[config.train.precision]
    used = {layer.dtype_policy.name for layer in task.model._flatten_layers()}
    if config.train.precision != "fp32" and policy not in used:
        raise UserError(
            f"train.precision is {config.train.precision} but no layer of the Keras model computes in it",
            f"call keras.config.set_dtype_policy({policy!r}) before the model is made",
        )
