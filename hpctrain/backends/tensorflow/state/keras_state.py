"""Saves and loads the state of a Keras run on this rank as named arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from hpctrain.backends.joint_statistics import BatchNorms
from hpctrain.backends.keras.keras_model import is_seed, optimizers_in, own_learning_rate, path_in
from hpctrain.backends.named_state import load_tensors, merged_over, refuse_unplaced
from hpctrain.backends.tensorflow.state.keras_tensors import VariableTensor, digest, model_tensors
from hpctrain.backends.tensorflow.task.keras_task_state import KerasLeaves, KerasTaskState
from hpctrain.backends.update import LossScale
from hpctrain.comm.group import Group
from hpctrain.config.combinations import refusal
from hpctrain.config.features import Feature
from hpctrain.system.array_types import Array
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.schedule import Factors, OwnRates
from hpctrain.train.seeds import derive, host_random_state, restore_host_random_state, seed_python
from hpctrain.train.state import ArrayTensor, Placement, StateTensor
from hpctrain.train.stateful import Kept, unchanged


class Rates:
    """Learning rates of a task's optimizers, as they were when the task was made."""

    def __init__(self, task: KerasTask) -> None:
        self.task = task
        self.rates = [(one, own_learning_rate(one)) for one in optimizers_in(task.optimizer).values()]
        self.factor: float | None = None
        """Last factor applied."""

    @property
    def current(self) -> float | None:
        """Current learning rate of the first optimizer; None without one."""
        return next((float(optimizer.learning_rate) for optimizer, _ in self.rates), None)

    def forget(self) -> None:
        """Forgets the last factor after loading, so that the run file's rates replace the saved ones."""
        self.factor = None

    def multiply(self, factors: Factors) -> None:
        """Sets all rates to the original rate times one factor; Keras optimizers have a single rate."""
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


@dataclass(frozen=True)
class Named:
    """Named variables of a task: its model's, others that it holds, and TensorFlow's random generator."""

    model: keras.Model
    task_state: KerasTaskState
    noise: tf.random.Generator
    equal: Sequence[tf.Variable] = ()
    """Model statistics that are equal on all ranks."""

    def tensors(self) -> list[VariableTensor]:
        """All named variables: ``model/...``, ``optimizer/...``, ``held/...``, ``rng/...``."""
        noise = VariableTensor("rng/tensorflow", self.noise.state, Placement.RANK)
        return [*model_tensors(self.model, self.equal), *self.task_state.tensors(), noise]


@contextlib.contextmanager
def put_back(variables: Sequence[VariableTensor]) -> Iterator[None]:
    """Restores variables and the host's random state after the body."""
    before = [np.array(one.host_view()) for one in variables]
    random = host_random_state()
    try:
        yield
    finally:
        for tensor, value in zip(variables, before, strict=True):
            tensor.assign(value)
        restore_host_random_state(random)


@dataclass(frozen=True)
class KerasState:
    """See train.framework.StateSource."""

    named: Named
    averages: Sequence[tf.Variable]
    """EMA of trained variables, in float32; empty without an EMA."""
    loss_scale: LossScale | None
    rates: Rates
    batch_norms: BatchNorms
    objects: Sequence[Kept]
    """Objects of the task whose state is saved."""
    leaves: KerasLeaves
    group: Group
    """Ranks that see different samples."""
    seed: int
    """Seed of the run."""

    def reseed(self, step: int) -> None:
        rank_seed = derive(self.seed, self.group.rank, 1, step)  # dropout must differ between ranks
        seed_python(rank_seed)
        self.named.noise.reset_from_seed(rank_seed)
        for number, variable in enumerate(filter(is_seed, self.named.model.non_trainable_variables)):
            variable.assign([derive(rank_seed, number) % 2**32, 0])
        if step:  # before the first step, the task's own seeds apply
            self.named.task_state.reseed(rank_seed)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores what forward passes in the body change."""
        equal = {id(variable) for variable in self.named.equal}
        changed = [one for one in self.variables() if one.placement is Placement.RANK or id(one.value) in equal]
        with put_back(changed), unchanged(self.objects, self.leaves):
            yield

    def kept_random_state(self) -> contextlib.AbstractContextManager[None]:
        return put_back([one for one in self.named.tensors() if one.name.startswith("rng/")])

    def merged_buffers(self, group: Group) -> contextlib.AbstractContextManager[None]:
        return merged_over(group, model_tensors(self.named.model, self.named.equal))

    def state(self) -> list[StateTensor]:
        """All state: ``model/...``, ``optimizer/...``, ``held/...``, ``ema/...``, ``scaler/...``, ``rng/...``."""
        scaler = self.loss_scale.tensors() if self.loss_scale else []
        host = [ArrayTensor(name, array, Placement.RANK) for name, array in host_random_state().items()]
        return [*self.variables(), *scaler, *host]

    def variables(self) -> list[VariableTensor]:
        """The state held in TensorFlow variables."""
        model = self.named.model
        paths = [path_in(model, variable) for variable in model.trainable_variables]
        averages = [VariableTensor(f"ema/{path}", value) for path, value in zip(paths, self.averages, strict=False)]
        return [*self.named.tensors(), *averages]

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Loads saved arrays; per-rank state that is missing (another number of ranks) keeps its value."""
        refuse_unplaced(arrays, self.named.task_state.made_with)
        load_tensors(self.variables(), arrays)
        if self.loss_scale:
            self.loss_scale.load(arrays)
        restore_host_random_state(arrays)
        self.batch_norms.follow()  # statistics may have been saved per rank
        self.rates.forget()

    def begin_averages(self) -> None:
        """Sets the averages to the current weights."""
        for average, variable in zip(self.averages, self.named.model.trainable_variables, strict=bool(self.averages)):
            average.assign(tf.cast(variable.value, tf.float32))

    def weights_hash(self, shared_only: bool = False) -> str:
        tensors = model_tensors(self.named.model, self.named.equal)
        return digest([tensor for tensor in tensors if tensor.placement is Placement.REPLICATED])
