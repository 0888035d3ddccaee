"""Saves and loads the state of a PyTorch run on this rank as named arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import Module

from hpctrain.backends.named_state import load_tensors, merged_over, parameter_of
from hpctrain.backends.torch.state import tensors
from hpctrain.backends.torch.state.optimizer import OptimizerState
from hpctrain.backends.torch.steps.own_step import OwnSteps
from hpctrain.backends.torch.steps.update_step import StepParts, UpdateStep
from hpctrain.backends.torch.strategies.partition import Partition
from hpctrain.backends.torch.task.task_state import TaskState
from hpctrain.backends.update import LossScale
from hpctrain.comm.group import Group
from hpctrain.train.seeds import derive, seed_python
from hpctrain.train.state import StateTensor, Tiling
from hpctrain.train.stateful import Kept, unchanged


class Averages:
    """Moving averages of this rank's trained parameters.

    Args:
        partition: this rank's part of the model.
        model: the model.
        names: names of its parameters, by id.
        decay: decay of the averages; None keeps none.
    """

    def __init__(self, partition: Partition, model: Module, names: Mapping[int, str], decay: float | None) -> None:
        self.partition, self.names = partition, names
        self.parameters = [one for _, one in partition.parameters(model) if one.requires_grad]
        self.values = [parameter.detach().clone() for parameter in self.parameters] if decay else []

    def begin(self) -> None:
        """Sets the averages to the current parameters."""
        for average, parameter in zip(self.values, self.parameters, strict=False):
            average.copy_(parameter.detach())

    def of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Averages of the given parameters."""
        known = {id(one): average for one, average in zip(self.parameters, self.values, strict=False)}
        return [known[id(one)] for one in parameters] if known else []

    def swap(self) -> None:
        """Exchanges parameters and averages; a second call restores both."""
        if self.values:
            self.partition.swap(self.parameters, self.values)

    def tensors(self) -> list[tensors.TorchTensor]:
        """Averages as ``ema/<parameter>``."""
        found: list[tensors.TorchTensor] = []
        for parameter, average in zip(self.parameters, self.values, strict=bool(self.values)):
            name = self.names[id(parameter)]
            found += tensors.tensors_of(f"ema/{name}", average, self.partition.places.get(name))
        return found


@dataclass
class TorchState:
    """See train.framework.StateSource."""

    parts: StepParts
    program: UpdateStep | OwnSteps
    optimizer_state: OptimizerState
    averages: Averages
    task_state: TaskState
    tilings: Mapping[str, Tiling]
    """How parameters are cut for any number of ranks, by name."""
    placed: Callable[[Iterable[StateTensor]], list[StateTensor]]
    """See strategies.strategy.PreparedModel."""
    other_names: Mapping[str, str]
    meta_init: frozenset[str]
    seed: int
    """Seed of the run."""
    layout: tensors.Layout
    """That of the model before its first pass."""
    shared: Mapping[str, torch.Tensor]
    """The model's buffers that shared memory with plain attributes then."""

    def state(self) -> list[StateTensor]:
        scaler = [tensor for scale in self._scales() for tensor in scale.tensors()]
        optimizer = self.optimizer_state.tensors()
        known = [tensor.value for tensor in optimizer if isinstance(tensor, tensors.TorchTensor)]
        found: list[StateTensor] = [
            *self.model_tensors(),
            *optimizer,
            *self.task_state.tensors(known, self.program.updates),
            *self.averages.tensors(),
            *scaler,
            *self.program.counters,
            *tensors.random_tensors(self.parts.compute.device),
        ]
        for place, it in enumerate(found):
            if isinstance(it, tensors.TorchTensor) and parameter_of(it.name) in self.tilings:
                found[place] = replace(it, tiling=self.tilings[parameter_of(it.name)])
        return self.placed(found)

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Loads saved arrays; per-rank state that is missing (another number of ranks) keeps its value."""
        load_tensors([*self.model_tensors(), *self.averages.tensors()], arrays)
        self.meta_init = frozenset()
        self.optimizer_state.load(arrays)
        self.task_state.load(arrays)
        for scale in self._scales():
            scale.load(arrays)
        for counter in self.program.counters:
            counter.value[...] = arrays.get(counter.name, 0)
        tensors.load_random(self.parts.compute.device, arrays)
        self.parts.batch_norms.follow()  # statistics may have been saved per rank

    def reseed(self, step: int) -> None:
        rank_seed = derive(self.seed, 1, self.parts.world.data.rank, step)  # dropout must differ between ranks
        seed_python(rank_seed)
        torch.manual_seed(rank_seed)
        for module in self.parts.model.modules():
            if reseed := getattr(module, "reseed", None):  # of a KerasModule
                reseed(rank_seed)
        tensor = self.parts.world.tensor
        sum_of = self.task_state.generators_checksum
        # Before the first step, the task's own seeds apply, unless ranks of one model would draw different numbers.
        if step or (tensor.size > 1 and not tensor.same(sum_of(), "compare random generators")):
            self.task_state.reseed(rank_seed)

    def kept_random_state(self) -> contextlib.AbstractContextManager[None]:
        return tensors.kept_random_state(self.parts.compute.device)

    def merged_buffers(self, group: Group) -> contextlib.AbstractContextManager[None]:
        return merged_over(group, self.model_tensors())

    def weights_hash(self, shared_only: bool = False) -> str:
        model = self.parts.model
        partition = self.parts.partition
        equal = self.parts.batch_norms.names
        joint = [buffer for name, buffer in model.named_buffers() if name in equal]
        weights = partition.shared(model) if shared_only else partition.parameters(model)
        return tensors.digest([*(one for _, one in weights), *joint])

    def require_same_layout(self) -> None:
        """Raises UserError if a pass or a hook has changed which parameters and buffers the model has."""
        tensors.require_same_layout(self.layout, tensors.layout_of(self.parts.model, self.parts.partition))
        tensors.require_same_memory(self.shared, self.parts.model)

    def model_tensors(self) -> list[tensors.TorchTensor]:
        """Parameters and saved buffers. Raises UserError if these are no longer those of the task."""
        self.require_same_layout()
        return tensors.model_tensors(self.parts.model, self.parts.batch_norms.names, self.parts.partition)

    def _scales(self) -> list[LossScale]:
        """Loss scales of all optimizers."""
        rules = [each.rule for each in self.parts.optimizer_steps.values()]
        return [rule.loss_scale for rule in rules if rule.loss_scale is not None]


@contextlib.contextmanager
def passes_leave(
    model: Module, task_state: TaskState, objects: Sequence[Kept], device: torch.device, with_parameters: bool = False
) -> Iterator[None]:
    """Restores what passes in the body change in the model, the loss, the task's objects and random states.

    Args:
        model: the model, on its device.
        task_state: state held by the task's functions.
        objects: objects of the task whose state is saved.
        device: the model's device.
        with_parameters: whether passes may change parameters, as tables with ``max_norm`` and a task's own step may.
    """
    buffers_of = [(dict(module._buffers), module) for module in model.modules()]
    changing = (*model.buffers(), *(model.parameters() if with_parameters else ()))
    before = [(one, one.detach().clone()) for one in changing]
    put_back = task_state.snapshot()
    try:
        with tensors.kept_random_state(device), unchanged(objects, task_state.leaves):
            yield
    finally:
        for buffers, module in buffers_of:
            module._buffers.update(buffers)  # a forward pass may have replaced them
        for one, value in before:
            one.data.copy_(value)  # which autograd does not notice: backward passes may follow
        put_back()
