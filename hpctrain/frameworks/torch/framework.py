"""One PyTorch model on this rank's device."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.config.combinations import Feature, refusal
from hpctrain.config.sections import Config, TrainConfig
from hpctrain.data import Samples
from hpctrain.frameworks.loss_scale import LossScale, loss_scale_of
from hpctrain.frameworks.named_state import load_tensors, named_outputs, plain_name
from hpctrain.frameworks.torch.dry_call import judges, try_loss, try_metrics, try_sharded
from hpctrain.frameworks.torch.flops import trying
from hpctrain.frameworks.torch.holdings import Holdings
from hpctrain.frameworks.torch.metrics import to_host, torch_meters
from hpctrain.frameworks.torch.optimizer import OptimizerState
from hpctrain.frameworks.torch.own_step import OwnSteps, own_models
from hpctrain.frameworks.torch.pipelined import Pipelined, parameter_of
from hpctrain.frameworks.torch.shares import ONLY, Share
from hpctrain.frameworks.torch.spoken import TorchLeaves
from hpctrain.frameworks.torch.state import (
    TorchTensor,
    digest,
    load_random,
    model_tensors,
    random_tensors,
    tensors_of,
)
from hpctrain.frameworks.torch.step_context import Setting
from hpctrain.frameworks.torch.sync_batchnorm import SyncBatchNorm, joint_names, trial
from hpctrain.frameworks.torch.unchanged import passes_leave
from hpctrain.frameworks.torch.updates import Exchanges, ExchangesToChoose, Passes, Trained
from hpctrain.frameworks.update import NotFinite, UpdateResult, UpdateRule, ranks_at_fault
from hpctrain.parallel.torch_fully_sharded import FullySharded
from hpctrain.parallel.torch_tensor import TensorParallel, tilings
from hpctrain.reduce.exchange_slots import ExchangeResult
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.reduce.torch_allreduce import pin, unpin
from hpctrain.tasks.definition import TorchTask, kept_objects
from hpctrain.train.clock import NO_CLOCK, Phase, StepClock
from hpctrain.train.evaluation import try_meters
from hpctrain.train.flops import Flops
from hpctrain.train.framework import HostBatch, StepResult, Sums
from hpctrain.train.in_step import in_step
from hpctrain.train.metrics import Meter, Seen
from hpctrain.train.saved_arrays import DerivedArrays, as_saved
from hpctrain.train.schedule import Factors, OwnRates
from hpctrain.train.seeds import derive, seed_python
from hpctrain.train.state import ArrayTensor, StateTensor

STEPS = "step/done"
"""Of the state: calls of a task's own step."""
LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def seed(seed: int) -> None:
    """Seeds torch's generators on the CPU and all GPUs."""
    torch.manual_seed(seed)


@dataclass(frozen=True)
class ReadyTask:
    """A task whose model is on this rank's device and equal on all ranks."""

    task: TorchTask
    model: torch.nn.Module
    """All models of the task as one."""
    shares: Mapping[str, Share]
    """Parameters by optimizer."""
    device: torch.device
    holdings: Holdings
    optimizer_state: OptimizerState
    reducers: ExchangesToChoose
    reducer: Exchanges | None
    """None if it has to be measured."""
    tensor: TensorParallel
    """What of the model this rank has, if it is cut."""
    other_names: Mapping[str, str]
    """See Framework."""
    joint: SyncBatchNorm | None = None
    """What joins the statistics of BatchNorm layers, if that is wanted on several ranks."""
    pipelined: Pipelined | None = None
    """What stands for the model if other ranks have other layers of it."""
    valueless: frozenset[str] = frozenset()
    """See Framework."""


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
        self.gives_back = ready.device.type == "cpu"
        self.model = ready.model
        self.optimizer: Any = ready.task.optimizer
        self.holdings = ready.holdings
        self.objects = kept_objects(ready.task)
        self.optimizer_state = ready.optimizer_state
        self.reducers = ready.reducers
        self.reducer = ready.reducer
        self.joint = ready.joint
        self.tensor = ready.tensor
        self.tilings = tilings(self.model, ready.task.tensor, plain_name)
        self.joint_names = joint_names(self.model) if ready.joint else frozenset[str]()
        self.memory_format = memory_format_of(train)
        self.meters = torch_meters(ready.task, ready.device)
        self.names = ready.optimizer_state.names
        self.other_names = ready.other_names
        self.valueless = ready.valueless
        self.frozen: list[torch.nn.Module] = []
        self.rate_factors: Factors = 1.0
        self.updates = 0
        self.meeting = world.data if ready.tensor.passes_meet else None
        self.flops: Flops | None = None
        models = own_models(ready.task.model, train.compile)
        self.pipelined = ready.pipelined
        self.num_layers = len(ready.pipelined.layers) if ready.pipelined else 0
        self.call: Any = self.pipelined or (models if isinstance(ready.task.model, Mapping) else models["model"])
        self.low_precision = LOW_PRECISION.get(train.precision)
        self.parameters = [one for _, one in ready.tensor.parameters(self.model) if one.requires_grad]
        self.average = [parameter.detach().clone() for parameter in self.parameters] if train.ema_decay else []
        self.trained = {name: self._trained(name, share) for name, share in ready.shares.items()}
        self.steps = np.zeros((), np.int64)
        self.own = None
        if ready.task.step is not None:
            setting = Setting(models, self.device, self.trained, train.accumulate, world.data, self.low_precision)
            optimizers = [part.optimizer for part in ready.optimizer_state.every]
            self.own = OwnSteps(ready.task, setting, optimizers)

    @property
    def leaves(self) -> TorchLeaves:
        return self.holdings.leaves

    @property
    def reducer_name(self) -> str | None:
        return self.reducer.name if self.reducer else None

    @property
    def gradient_bytes(self) -> int:
        tables = {id(parameter) for reducers in self.reducers.of.values() for parameter in reducers.sparse}
        apart = tables | self.tensor.complete
        return sum(4 * parameter.numel() for parameter in self.parameters if id(parameter) not in apart)

    def set_learning_rate(self, factors: Factors) -> None:
        if factors != self.rate_factors and not isinstance(factors, OwnRates):
            self.rate_factors = factors
            self.optimizer_state.set_rates(factors)

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        self._for_training()
        if self.own is not None and global_samples < self.world.data.size:
            uses = {Feature.SHORT_BATCH: global_samples, Feature.RANKS: self.world.data.size}
            raise refusal(uses | {Feature.OWN_STEP: True})
        if self.pipelined and not self.updates:
            self.pipelined.require_same_samples(micro_batches)
        if self.reducer is None:
            self.reducer = self._measure(micro_batches, global_samples)
        self.updates += 1
        if self.own is not None:
            return self._own_step(self.own, micro_batches, global_samples)
        with self._joint_statistics(micro_batches):
            loss, totals = self._gradients(self.reducer, micro_batches, global_samples, self.clock)
        self.clock.mark(Phase.EXCHANGE)
        if self.device.type == "cpu":  # kernels of GPUs may add in any order
            self.tensor.require_same_loss(loss, self.updates)
        if self.updates == 1:
            self.tensor.require_whole_gradients(self.reducer.of[ONLY].summed(), self.world.everyone)
        try:
            decision = self.trained[ONLY].update(self.reducer.of[ONLY], totals, self.clock)
        except NotFinite:
            raise ranks_at_fault(self.world.data, math.isfinite(loss[0])) from None
        self.clock.mark(Phase.OPTIMIZER)
        return UpdateResult(loss, decision.norm)

    def _own_step(self, own: OwnSteps, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        """The task's own; its rank's part is one batch."""
        assert self.reducer is not None, "measured by now"
        with self._joint_statistics(micro_batches):
            result = self._run(own, micro_batches[0], global_samples, self.reducer, self.clock)
        self.steps += 1
        return result

    def _run(
        self,
        own: OwnSteps,
        host: HostBatch,
        global_samples: int,
        exchanges: Exchanges,
        clock: StepClock,
        applies: bool = True,
    ) -> StepResult:
        batch = self._to_device(host)
        clock.mark(Phase.TO_DEVICE)
        statistics = self.joint.statistics if self.joint else None
        return own.run(batch, global_samples, exchanges, clock, int(self.steps), applies, statistics)

    def _gradients(
        self, exchanges: Exchanges, micro_batches: Sequence[HostBatch], global_samples: int, clock: StepClock
    ) -> tuple[tuple[float, float], ExchangeResult]:
        """Forward, backward, exchange: this rank's (loss sum, weight), and all ranks' totals."""
        reducer = exchanges.of[ONLY]
        passes = Passes(reducer, self.trained[ONLY].rule.scale, global_samples)
        if self.pipelined:
            self.pipelined.run(passes, micro_batches, self._to_device, self._autocast, clock)
        batches = [] if self.pipelined else list(in_step(micro_batches, self.meeting))
        for number, (host, is_own) in enumerate(batches, start=1):
            if self.joint:
                self.joint.statistics.begin_micro_batch(number - 1)
            batch = self._to_device(host)
            clock.mark(Phase.TO_DEVICE)
            reducer.last_backward = number == len(batches)
            with contextlib.nullcontext() if is_own else self._unchanged():
                with self._autocast(), self.tensor.passing():
                    score = self.task.loss(self.task.forward(self.call, batch), batch)
                self.tensor.leave()
                clock.mark(Phase.FORWARD)
                passes.add(score, samples_of(host), is_own=is_own)
                self.tensor.finish(self.device)
            clock.mark(Phase.BACKWARD)
        if not micro_batches:
            clock.mark(Phase.BACKWARD)  # nothing to do, and so arrived
        totals = passes.exchange()
        return (float(passes.loss), float(passes.weight)), totals

    def _measure(self, micro_batches: Sequence[HostBatch], global_samples: int) -> Exchanges:
        """Rehearses steps on the first batch; what they change in the model is put back."""

        def rehearse(exchanges: Exchanges) -> None:
            copies = [copied(batch) for batch in micro_batches]  # a task may change its inputs in place
            with self._joint_statistics(copies):
                if self.own is not None:
                    self._run(self.own, copies[0], global_samples, exchanges, NO_CLOCK, applies=False)
                else:
                    self._gradients(exchanges, copies, global_samples, NO_CLOCK)

        with self._unchanged():
            return self.choice.measured(self.reducers, rehearse)

    def _joint_statistics(self, micro_batches: Sequence[HostBatch]) -> contextlib.AbstractContextManager[None]:
        """BatchNorm in an update: over the samples of all ranks, if that is wanted."""
        return self.joint.update(len(micro_batches)) if self.joint else contextlib.nullcontext()

    def _unchanged(self) -> contextlib.AbstractContextManager[None]:
        return passes_leave(self.model, self.holdings, self.objects, self.device)

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = ()) -> None:
        with self._unchanged(), self._autocast(), trial() if self.joint else contextlib.nullcontext():
            self._for_training()
            if self.own is not None:
                self.own.dry_call(self._to_device(copied(batch)), int(self.steps))
            elif self.pipelined:
                own_stage, on_device = self.pipelined, self._to_device(copied(batch))
                dry = lambda: own_stage.dry_call(on_device)  # noqa: E731
                _, self.flops = trying(dry, self.model, samples_of(batch), self.low_precision, meets=True)
            else:
                trains = any(parameter.requires_grad for parameter in self.model.parameters())

                def call() -> Any:
                    with self.tensor.passing():
                        batch_here = self._to_device(copied(batch))
                        return try_loss(self.task, self.model, batch_here, trains, self.tensor.hint)

                meets = self.meeting is not None or bool(self.tensor.slices)
                loss, self.flops = trying(call, self.model, samples_of(batch), self.low_precision, meets)
                if isinstance(self.tensor, FullySharded):
                    try_sharded(loss)
            for held_out in (validation or [batch]) if self.task.validation is not None else ():
                with self._for_evaluation(), self.tensor.passing():
                    given = self.task.model if isinstance(self.task.model, Mapping) else self.pipelined or self.model
                    try_metrics(self.task, given, self._to_device(copied(held_out)))
                try_meters(self, copied(held_out))

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        with self._for_evaluation():
            inputs = self._to_device(batch)
            with self._autocast(), self.tensor.passing():
                outputs = self.task.forward(self.call, inputs)
                scores = {name: judge(outputs, inputs) for name, judge in judges(self.task).items()}
            seen = Seen(outputs, inputs, batch, to_host)
            for meter in meters:
                meter.update(seen)
            samples = samples_of(batch)
            return {name: _sum_and_weight(score, samples) for name, score in scores.items()}

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        with self._for_evaluation(), self._autocast(), self.tensor.passing():
            outputs = self.task.forward(self.call, self._to_device(batch))
        return {name: _to_host(value) for name, value in named_outputs(outputs).items()}

    def state(self) -> list[StateTensor]:
        scaler = [tensor for scale in self._scales() for tensor in scale.tensors()]
        counted = [ArrayTensor(STEPS, self.steps)] if self.own is not None else []
        optimizer = self.optimizer_state.tensors()
        known = [tensor.tensor for tensor in optimizer if isinstance(tensor, TorchTensor)]
        found: list[StateTensor] = [
            *model_tensors(self.model, self.joint_names, self.tensor),
            *optimizer,
            *self.holdings.tensors(known, self.updates),
            *self._average_tensors(),
            *scaler,
            *counted,
            *random_tensors(self.device),
        ]
        for place, it in enumerate(found):
            if isinstance(it, TorchTensor) and parameter_of(it.name) in self.tilings:
                found[place] = replace(it, tiling=self.tilings[parameter_of(it.name)])
        return self.pipelined.placed(found) if self.pipelined else found

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Each rank's own state may be missing (another number of ranks): it then keeps what it has."""
        saved = as_saved(arrays)
        arrays = DerivedArrays({plain_name(name): (saved, name) for name in saved})  # 0.2 saved those of compiled ones
        load_tensors([*model_tensors(self.model, self.joint_names, self.tensor), *self._average_tensors()], arrays)
        self.valueless = frozenset()
        self.optimizer_state.load(arrays)
        self.holdings.load(arrays)
        self.rate_factors = math.nan  # the rates of the run file hold, not the saved ones
        for scale in self._scales():
            scale.load(arrays)
        self.steps[...] = arrays.get(STEPS, 0)
        load_random(self.device, arrays)
        if self.joint:  # each rank may have had its own when they were saved
            self.joint.follow()

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

    def weights_hash(self, shared_only: bool = False) -> str:
        joint = [buffer for name, buffer in self.model.named_buffers() if name in self.joint_names]
        weights = self.tensor.shared(self.model) if shared_only else self.tensor.parameters(self.model)
        return digest([*(one for _, one in weights), *joint])

    def close(self) -> None:
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        self.tensor.region.exchange.close()
        if self.pipelined:
            self.pipelined.stage.exchange.close()
        if self.own is not None:
            self.own.guard.close()
        if self.joint is not None:
            self.joint.close()
            self.joint = None

    def _trained(self, name: str, share: Share) -> Trained:
        """An optimizer with its part of the averages."""
        train = self.config.train
        average_of = {id(one): average for one, average in zip(self.parameters, self.average, strict=False)}
        parameters: list[Tensor] = [parameter for _, parameter in share.pairs]
        return Trained(
            name=name,
            optimizer=self.optimizer[name] if name else self.optimizer,
            parameters=parameters,
            average=[average_of[id(parameter)] for parameter in parameters] if self.average else [],
            average_weight=1 - (train.ema_decay or 0),
            rule=UpdateRule(train.clip_norm, loss_scale_of(name) if train.precision == "fp16" else None),
            tensor=self.tensor,
            stages=self.world.pipeline,
        )

    def _scales(self) -> list[LossScale]:
        """Of all optimizers."""
        return [each.rule.loss_scale for each in self.trained.values() if each.rule.loss_scale is not None]

    def _average_tensors(self) -> list[TorchTensor]:
        found: list[TorchTensor] = []
        for parameter, average in zip(self.parameters, self.average, strict=bool(self.average)):
            name = self.names[id(parameter)]
            found += tensors_of(f"ema/{name}", average, self.tensor.places.get(name))
        return found

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
        if self.average:
            self.tensor.swap(self.parameters, self.average)

    def _to_device(self, batch: HostBatch) -> dict[str, Tensor]:
        if self.device.type == "cpu" and self.memory_format is torch.preserve_format:
            return {name: writable(array) for name, array in batch.items()}
        return {name: self._tensor(array) for name, array in batch.items()}

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        host = writable(array)
        if self.device.type == "cuda":
            host = host.pin_memory().to(self.device, non_blocking=True)
        return host.to(memory_format=self.memory_format) if host.ndim == 4 else host


def memory_format_of(train: TrainConfig) -> torch.memory_format:
    """Of the model and of batches of images."""
    return torch.channels_last if train.channels_last else torch.preserve_format


def writable(array: NDArray[Any]) -> Tensor:
    """A host array as a tensor: over the same memory if a task may change it in place, else over a copy."""
    return torch.from_numpy(array if array.flags.carray else np.array(array))


def copied(batch: HostBatch) -> dict[str, NDArray[Any]]:
    """A batch that a task may change in place."""
    return {name: np.array(array) for name, array in batch.items()}


def samples_of(batch: HostBatch) -> int:
    """Length of the leading axis."""
    return len(next(iter(batch.values())))


def _sum_and_weight(score: Any, samples: int) -> tuple[float, float]:
    if isinstance(score, tuple):
        return float(score[0]), float(score[1])
    return float(score) * samples, float(samples)


def _to_host(output: Tensor) -> NDArray[Any]:
    output = output.detach().cpu()
    return (output.float() if output.dtype == torch.bfloat16 else output).numpy()
