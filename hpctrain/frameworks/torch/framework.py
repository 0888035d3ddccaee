"""One PyTorch model on this rank's device."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.config.sections import Config, TrainConfig
from hpctrain.data import Samples
from hpctrain.frameworks.loss_scale import LossScale
from hpctrain.frameworks.named_state import load_tensors, named_outputs, require_same_model
from hpctrain.frameworks.torch.checks import require_own_statistics, require_scalar, require_trainable
from hpctrain.frameworks.torch.device import pick_device, require_same_kind
from hpctrain.frameworks.torch.dry_call import try_loss, try_metrics
from hpctrain.frameworks.torch.holdings import Holdings
from hpctrain.frameworks.torch.optimizer import OptimizerState
from hpctrain.frameworks.torch.spoken import TorchLeaves
from hpctrain.frameworks.torch.state import (
    TorchTensor,
    digest,
    load_random,
    model_tensors,
    other_names,
    random_tensors,
    state_of,
)
from hpctrain.frameworks.update import Decision, NotFinite, UpdateResult, UpdateRule, ranks_at_fault
from hpctrain.reduce.exchange_slots import ExchangeResult
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.reduce.torch_allreduce import pin, unpin
from hpctrain.reduce.torch_reducer import (
    Number,
    Reducer,
    TorchReducers,
    broadcast,
)
from hpctrain.tasks.definition import Task, kept_objects
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.framework import HostBatch, Sums
from hpctrain.train.schedule import Factors, OwnRates
from hpctrain.train.seeds import derive, seed_python
from hpctrain.train.state import StateTensor
from hpctrain.train.stateful import unchanged

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def seed(seed: int) -> None:
    """Seeds torch's generators on the CPU and all GPUs."""
    torch.manual_seed(seed)


@dataclass(frozen=True)
class ReadyTask:
    """A task whose model is on this rank's device and equal on all ranks."""

    task: Task
    device: torch.device
    holdings: Holdings
    optimizer_state: OptimizerState
    reducers: TorchReducers
    reducer: Reducer | None
    """None if it has to be measured."""


class TorchFramework:
    """Trains, evaluates and predicts with a TorchTask; see train.framework.Framework.

    If the reducer has to be measured, that is done on the batch of the first update.
    """

    name = "torch"

    def __init__(self, ready: ReadyTask, world: World, config: Config, clock: StepClock, choice: ReducerChoice) -> None:
        """
        Args:
            ready: see ``open_torch``, which makes one, and of it a framework.
            world, config, clock, choice: see there.
        """
        train = config.train
        self.task, self.world, self.config, self.clock, self.choice = ready.task, world, config, clock, choice
        self.device = ready.device
        self.model: torch.nn.Module = ready.task.model
        self.optimizer: torch.optim.Optimizer = ready.task.optimizer
        self.holdings = ready.holdings
        self.objects = kept_objects(ready.task)
        self.optimizer_state = ready.optimizer_state
        self.reducers = ready.reducers
        self.reducer = ready.reducer
        self.memory_format = memory_format_of(train)
        self.names = ready.optimizer_state.names
        self.other_names = other_names(self.model)
        self.frozen: list[torch.nn.Module] = []
        self.rate_factors: Factors = 1.0
        self.updates = 0
        self.call = torch.compile(self.model) if train.compile else self.model
        self.low_precision = LOW_PRECISION.get(train.precision)
        self.scale = LossScale() if train.precision == "fp16" else None
        self.rule = UpdateRule(train.clip_norm, self.scale)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.average = [parameter.detach().clone() for parameter in self.parameters] if train.ema_decay else []
        self.average_weight = 1 - (train.ema_decay or 0)

    @property
    def leaves(self) -> TorchLeaves:
        return self.holdings.leaves

    @property
    def reducer_name(self) -> str | None:
        return self.reducer.name if self.reducer else None

    @property
    def gradient_bytes(self) -> int:
        return sum(4 * parameter.numel() for parameter in self.parameters)

    def set_learning_rate(self, factors: Factors) -> None:
        if factors != self.rate_factors and not isinstance(factors, OwnRates):
            self.rate_factors = factors
            self.optimizer_state.set_rates(factors)

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        self._for_training()
        if self.reducer is None:
            self.reducer = self._measure(micro_batches, global_samples)
        loss, totals = self._gradients(self.reducer, micro_batches, global_samples, self.clock)
        self.clock.mark(Phase.EXCHANGE)
        decision = self._finish_gradients(self.reducer, totals, math.isfinite(loss[0]))
        if decision.factor is not None:
            self.optimizer.step()
            self.updates += 1
            if self.average:
                with torch.no_grad():
                    torch._foreach_lerp_(self.average, self.parameters, self.average_weight)
        self.clock.mark(Phase.OPTIMIZER)
        return UpdateResult(loss, decision.norm)

    def _gradients(
        self, reducer: Reducer, micro_batches: Sequence[HostBatch], global_samples: int, clock: StepClock
    ) -> tuple[tuple[float, float], ExchangeResult]:
        """Forward, backward, exchange: this rank's (loss sum, weight), and all ranks' totals."""
        reducer.begin()
        factor = self.rule.scale / global_samples
        loss: Number = 0.0
        weight: Number = 0.0
        weighted = False
        for number, host in enumerate(micro_batches, start=1):
            batch = self._to_device(host)
            clock.mark(Phase.TO_DEVICE)
            with self._autocast():
                score = self.task.loss(self.task.forward(self.call, batch), batch)
            clock.mark(Phase.FORWARD)
            weighted = isinstance(score, tuple)
            samples = samples_of(host)
            total, part = score if weighted else (score, samples)
            require_scalar(total)
            if total.dtype in LOW_PRECISION.values():
                total = total.float()  # sums over samples, and the loss scale, do not fit into 16 bits
            if not weighted:
                total = total * samples
            reducer.last_backward = number == len(micro_batches)
            (total * factor).backward()
            loss = loss + total.detach()
            weight = weight + (part.detach() if isinstance(part, Tensor) else part)
            clock.mark(Phase.BACKWARD)
        if not micro_batches:
            clock.mark(Phase.BACKWARD)  # nothing to do, and so arrived
        totals = reducer.exchange(loss / global_samples, weight / global_samples if weighted else None)
        return (float(loss), float(weight)), totals

    def _finish_gradients(self, reducer: Reducer, totals: ExchangeResult, own_finite: bool) -> Decision:
        """Divides by weights and loss scale, and clips, unless the update is left out."""
        norm = global_norm(reducer.gradients()) if self.rule.needs_norm else None
        try:
            decision = self.rule.decide(totals, norm)
        except NotFinite:
            raise ranks_at_fault(self.world.data, own_finite) from None
        if decision.factor is not None and decision.factor != 1:
            torch._foreach_mul_(reducer.gradients(), decision.factor)
        return decision

    def _measure(self, micro_batches: Sequence[HostBatch], global_samples: int) -> Reducer:
        """Rehearses steps on the first batch; what they change in the model is put back."""

        def rehearse(reducer: Reducer) -> None:
            copies = [copied(batch) for batch in micro_batches]
            self._gradients(reducer, copies, global_samples, _NoClock())  # a task may change its inputs in place

        with self._unchanged():
            return self.choice.measured(self.reducers, rehearse)

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """What forward passes in the body change in model, loss, the task's objects and random states is put back."""
        buffers_of = [(dict(module._buffers), module) for module in self.model.modules()]
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        random = {tensor.name: np.array(tensor.array) for tensor in random_tensors(self.device)}
        held = self.holdings.snapshot()
        try:
            with unchanged(self.objects, self.leaves):
                yield
        finally:
            for buffers, module in buffers_of:
                module._buffers.update(buffers)  # a forward pass may have put new tensors in their place
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            self.holdings.load(held)
            load_random(self.device, random)

    def dry_call(self, batch: HostBatch) -> None:
        with self._unchanged(), self._autocast():
            self._for_training()
            trains = any(parameter.requires_grad for parameter in self.model.parameters())
            try_loss(self.task, self.model, self._to_device(copied(batch)), trains)
            if self.task.validation is not None:
                with self._for_evaluation():
                    try_metrics(self.task, self.model, self._to_device(copied(batch)))

    def evaluate(self, batch: HostBatch) -> Sums:
        with self._for_evaluation():
            inputs = self._to_device(batch)
            with self._autocast():
                outputs = self.task.forward(self.call, inputs)
                scores = {"loss": self.task.loss(outputs, inputs)}
                scores |= {name: metric(outputs, inputs) for name, metric in self.task.metrics.items()}
            samples = samples_of(batch)
            return {name: _sum_and_weight(score, samples) for name, score in scores.items()}

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        with self._for_evaluation(), self._autocast():
            outputs = self.task.forward(self.call, self._to_device(batch))
        return {name: _to_host(value) for name, value in named_outputs(outputs).items()}

    def state(self) -> list[StateTensor]:
        scaler = self.scale.tensors() if self.scale else []
        optimizer = self.optimizer_state.tensors()
        known = [tensor.tensor for tensor in optimizer if isinstance(tensor, TorchTensor)]
        return [
            *model_tensors(self.model),
            *optimizer,
            *self.holdings.tensors(known, self.updates),
            *self._average_tensors(),
            *scaler,
            *random_tensors(self.device),
        ]

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Each rank's own state may be missing (another number of ranks): it then keeps what it has."""
        load_tensors([*model_tensors(self.model), *self._average_tensors()], arrays)
        self.optimizer_state.load(arrays)
        self.holdings.load(arrays)
        self.rate_factors = math.nan  # the rates of the run file hold, not the saved ones
        if self.scale:
            self.scale.load(arrays)
        load_random(self.device, arrays)

    def reseed(self, step: int) -> None:
        rank_seed = derive(self.config.seed, 1, self.world.data.rank, step)  # dropout must differ between ranks
        seed_python(rank_seed)
        seed(rank_seed)
        if step:  # before the first one, the task's own seeds hold
            self.holdings.reseed(rank_seed)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def place(self, samples: Samples) -> Samples:
        """The copy to the GPU may last until the update is done: a batch is kept until then."""
        if self.device.type != "cuda":
            return samples
        torch.cuda.set_device(self.device)  # of this thread, which would else open a context on the first GPU
        return {name: writable(array).pin_memory().numpy() for name, array in samples.items()}

    def staging(self, num_bytes: int) -> NDArray[np.uint8]:
        """Page-locked if the model is on a GPU."""
        try:
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
            buffer = memory.numpy()
            if self.device.type == "cuda":  # torch's own page-locked memory is rounded up to a power of two, and kept
                pin(memory)
                weakref.finalize(buffer, unpin, memory.data_ptr()).atexit = False
            return buffer
        except RuntimeError as error:  # as torch calls it
            raise MemoryError(f"no host memory for a snapshot of {num_bytes} bytes") from error

    def weights_hash(self) -> str:
        return digest(list(self.model.parameters()))

    def close(self) -> None:
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None

    def _average_tensors(self) -> list[TorchTensor]:
        return [
            TorchTensor(f"ema/{self.names[id(parameter)]}", average)
            for parameter, average in zip(self.parameters, self.average, strict=bool(self.average))
        ]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.low_precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.low_precision)

    def _for_training(self) -> None:
        """Layers in training mode, except those that the task keeps in evaluation mode (frozen statistics)."""
        if not self.model.training:
            self.model.train()
            for module in self.frozen:
                module.training = False

    @contextlib.contextmanager
    def _for_evaluation(self) -> Iterator[None]:
        """No gradients, layers in evaluation mode, and the averaged weights if there are any."""
        if self.model.training:
            self.frozen = [module for module in self.model.modules() if not module.training]
            self.model.eval()
        self._swap_average()
        try:
            with torch.no_grad():
                yield
        finally:
            self._swap_average()

    def _swap_average(self) -> None:
        for parameter, average in zip(self.parameters, self.average, strict=bool(self.average)):
            parameter.data, average.data = average.data, parameter.data

    def _to_device(self, batch: HostBatch) -> dict[str, Tensor]:
        return {name: self._tensor(array) for name, array in batch.items()}

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        host = writable(array)
        if self.device.type == "cuda":
            host = host.pin_memory().to(self.device, non_blocking=True)
        return host.to(memory_format=self.memory_format) if host.ndim == 4 else host


def open_torch(task: Task, world: World, config: Config, clock: StepClock, choice: ReducerChoice) -> TorchFramework:
    """A framework whose model is on this rank's device and equal on all ranks. Collective.

    Args:
        task: a TorchTask.
        world: the ranks.
        config: of the run.
        clock: marks where the time of a step goes.
        choice: how the reducer is chosen.

    Raises:
        UserError: the task cannot be trained, the ranks' models differ, or the reducer that the configuration names
            cannot be used.
    """
    train, model = config.train, task.model
    device = pick_device(world.local_rank)
    require_same_kind(device, world)
    if train.threads is not None:  # a supervisor has set it in the environment; mpirun has not
        torch.set_num_threads(train.threads)
    apart = [one.value for one in kept_objects(task)]
    holdings = Holdings(task.optimizer, {"loss": task.loss, "forward": task.forward}, model, apart)
    parts = holdings.parts()
    require_trainable(model, [part.optimizer for part in parts], train.channels_last, train.ema_decay is not None)
    require_own_statistics(model, world.data.size)
    model.to(device, memory_format=memory_format_of(train))
    tensors = state_of(model)
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    require_same_model(world.data, described, "tensors")
    broadcast(world.data, list(tensors.values()), "receive the model")
    optimizer_state = OptimizerState(parts, {id(parameter): name for name, parameter in model.named_parameters()})
    if device.type != "cpu":
        optimizer_state.to_device()
    reducers = TorchReducers(model, config.reduce)
    ready = ReadyTask(task, device, holdings, optimizer_state, reducers, choice.known(reducers))
    framework = TorchFramework(ready, world, config, clock, choice)
    framework.reseed(0)
    return framework


def memory_format_of(train: TrainConfig) -> torch.memory_format:
    """Of the model and of batches of images."""
    return torch.channels_last if train.channels_last else torch.preserve_format


class _NoClock:
    def mark(self, phase: Phase) -> None:
        """Rehearsals are not steps."""

    def end_step(self, work: float) -> None:
        """Nor do they end one."""


def writable(array: NDArray[Any]) -> Tensor:
    """A host array as a tensor: over the same memory if a task may change it in place, else over a copy."""
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else np.array(array))


def copied(batch: HostBatch) -> dict[str, NDArray[Any]]:
    """A batch that a task may change in place."""
    return {name: np.array(array) for name, array in batch.items()}


def samples_of(batch: HostBatch) -> int:
    """Length of the leading axis."""
    return len(next(iter(batch.values())))


def global_norm(tensors: Sequence[Tensor]) -> float:
    """L2 norm over all elements of all tensors."""
    if not tensors:
        return 0.0
    norms = torch._foreach_norm(list(tensors))
    return float(torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0])


def _sum_and_weight(score: Any, samples: int) -> tuple[float, float]:
    if isinstance(score, tuple):
        return float(score[0]), float(score[1])
    return float(score) * samples, float(samples)


def _to_host(output: Tensor) -> NDArray[Any]:
    output = output.detach().cpu()
    return (output.float() if output.dtype == torch.bfloat16 else output).numpy()
