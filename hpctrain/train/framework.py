"""The protocols that the training loop needs from PyTorch or TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.config.features import Feature
from hpctrain.config.sections import ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.data.dataset import Samples
from hpctrain.system.array_types import Array, Bytes
from hpctrain.train.flops import Flops
from hpctrain.train.metrics import Meter
from hpctrain.train.schedule import Factors
from hpctrain.train.state import StateTensor
from hpctrain.train.tree import Leaves

HostBatch = Mapping[str, Array]
"""A rank's part of a global batch: arrays with a leading sample axis."""

Sums = dict[str, tuple[float, float]]
"""(sum, weight) by name: add both up over batches and ranks, then divide."""


GRADIENT = "the gradient"
SPOILED_FIX = (
    "look for roots, logarithms and divisions near 0, whose gradients are not finite though their values are, or lower "
    "the learning rate; train.clip_norm finds such a gradient before it reaches the weights"
)
"""The fix if weights or the gradient are not finite."""


class NonFiniteLoss(Exception):
    """The loss or the averaged gradient is not finite; raised by every rank at the same step."""

    def __init__(self, ranks: Sequence[int], what: str = "the loss") -> None:
        super().__init__(f"{what} is not finite on ranks {list(ranks)}")
        self.what = what
        """What is not finite, for messages."""
        self.ranks = list(ranks)
        """Data-group ranks whose own loss or gradient is not finite; empty if only the sum over ranks overflowed."""


def samples_of(batch: Mapping[str, Sized]) -> int:
    """How many samples a batch has: the length of its leading axis."""
    return len(next(iter(batch.values())))


def copied(batch: HostBatch) -> dict[str, Array]:
    """Copies a batch that a task may change in place."""
    return {name: np.array(array) for name, array in batch.items()}


class StepResult(Protocol):
    """Result of one update. Values may still be on a device: reading them waits for it."""

    def sums(self) -> Sums:
        """This rank's (sum, weight) of ``loss`` and, if known, ``grad_norm`` (weight 1)."""


@dataclass(frozen=True)
class Facts:
    """What is currently known about a framework and its model."""

    name: str
    """``torch`` or ``tensorflow``."""
    leaves: Leaves
    """Handles leaves in the state of objects, including the framework's tensors."""
    gradient_bytes: int
    """Size of all exchanged gradients in fp32, before compression."""
    reducer_name: str | None = None
    """The reducer that averages gradients, such as ``mpi-node``; None until one has been chosen by measuring."""
    flops: Flops | None = None
    """FLOPs per training sample, once ``dry_call`` has counted them; None if they cannot be counted."""
    num_layers: int = 0
    """Layers in this rank's pipeline stages; 0 without a pipeline."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Other names of shared tensors (tied weights), mapped to the name used by ``state``."""
    meta_init: frozenset[str] = frozenset()
    """Names of model weights that, on any rank, have no values before ``load``."""
    undeclared: Sequence[str] = ()
    """State that the first updates changed but ``state`` does not include, for messages, such as ``loss: calls``."""
    nccl: Mapping[str, str] = field(default_factory=dict)
    """Version and variables of NCCL, if the model is on a GPU that uses it."""
    advice: Sequence[str] = ()
    """Sentences on what this run leaves unused of its device."""
    learning_rate: float | None = None
    """Current learning rate of the optimizer's first parameter group; None if it has none."""
    meters: Mapping[str, Meter] = field(default_factory=dict)
    """Metrics of ``train.metrics`` that keep state; they have seen the batches since they were last reset."""
    through_host_s: float = 0.0
    """Estimated seconds per update in which gradients of GPUs go through host memory; 0 if they do not."""


class HostMemory:
    """Host memory with the fastest copies from and to the device; here ordinary memory, as TensorFlow uses it."""

    def place(self, samples: Samples) -> Samples:
        """Copies a batch into such memory; called ahead of use by the loader's thread."""
        return samples

    def staging(self, num_bytes: int, given: Bytes | None = None) -> Bytes:
        """Zero-filled memory for ``copy_into``, or the memory that is ``given``, as it is.

        Raises:
            MemoryError: there is not enough memory.
        """
        return np.full(num_bytes, 0, np.uint8) if given is None else given  # touched: no page faults in a snapshot

    def synchronize(self) -> None:
        """Waits for all copies begun by ``copy_into``."""


class Step(Protocol):
    """Trains the model."""

    @property
    def facts(self) -> Facts:
        """The current facts."""

    def set_learning_rate(self, factors: Factors) -> None:
        """Sets the optimizer's learning rates to these multiples of their initial values, except for ``OwnRates``.

        Raises UserError if the number of factors differs from the number of parameter groups.
        """

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        """One update over this rank's part of a global batch of ``global_samples`` samples: forward, backward,
        exchange, optimizer.

        Raises NonFiniteLoss, on every rank, unless loss scaling skips the step.
        """

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = (), pair: HostBatch | None = None) -> None:
        """Tries forward pass, loss and metrics on a batch, and leaves all state as it was. Needs no other rank, unless
        there is a ``sync_group``.

        A ``pair`` of samples shows how the loss averages, if the batch has only one. Evaluation is tried on a batch of
        each ``validation`` set, or on the same batch if there is none.

        Raises UserError naming the task's field at fault, and the user's line.
        """


class Evaluator(Protocol):
    """Evaluates and predicts with the current model."""

    @property
    def meters(self) -> Mapping[str, Meter]:
        """The task's metrics that are not plain functions, by name."""

    @property
    def sync_group(self) -> Group | None:
        """Ranks that communicate in each pass and so need the same number of passes (see ``even_batches``); None if
        passes are independent."""

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        """This rank's (sum, weight) of the loss and of each function metric, without training. The ``meters`` are
        updated with the batch, too."""

    def predict(self, batch: HostBatch) -> dict[str, Array]:
        """Outputs, sample axis first; a model with a single output names it ``output``."""


class State(Protocol):
    """State of the model and the optimizer on this rank."""

    def state(self) -> Sequence[StateTensor]:
        """All tensors of model, optimizer, EMA, loss scale and random states, in a fixed order."""

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Loads values by the names of ``state``; raises UserError naming what is missing or has another shape."""

    def reseed(self, step: int) -> None:
        """Restarts this rank's random streams with new ones that depend on the step."""

    def kept_random_state(self) -> AbstractContextManager[None]:
        """Restores this rank's random state after the body."""

    def merged_buffers(self, group: Group) -> AbstractContextManager[None]:
        """A context for evaluations and predictions, in which rank-local buffers of the model, such as BatchNorm
        statistics, are merged over the ranks of the group as in an export. Collective."""

    def weights_hash(self, shared_only: bool = False) -> str:
        """SHA-256, in hexadecimal, over this rank's model parameters in a fixed order.

        Args:
            shared_only: hash only replicated parameters, not sharded layers.
        """


class Judged(Evaluator, State, Protocol):
    """What is evaluated."""


class StateSource(State, Protocol):
    """The state, and the host memory that it is copied to."""

    @property
    def facts(self) -> Facts:
        """The current facts."""

    @property
    def host(self) -> HostMemory:
        """Host memory for copies of the state."""


class Framework(Step, Evaluator, StateSource, Protocol):
    """One model on this rank's device. Only the code that opens a framework needs the whole protocol."""

    def close(self) -> None:
        """Releases resources that Python does not manage."""


class FrameworkOfParts:
    """Delegates the methods of ``Evaluator`` and ``State`` to two parts of a framework."""

    evaluator: Evaluator
    source: State

    @property
    def meters(self) -> Mapping[str, Meter]:
        return self.evaluator.meters

    @property
    def sync_group(self) -> Group | None:
        return self.evaluator.sync_group

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        return self.evaluator.evaluate(batch, meters)

    def predict(self, batch: HostBatch) -> dict[str, Array]:
        return self.evaluator.predict(batch)

    def state(self) -> Sequence[StateTensor]:
        return self.source.state()

    def load(self, arrays: Mapping[str, Array]) -> None:
        self.source.load(arrays)

    def reseed(self, step: int) -> None:
        self.source.reseed(step)

    def kept_random_state(self) -> AbstractContextManager[None]:
        return self.source.kept_random_state()

    def merged_buffers(self, group: Group) -> AbstractContextManager[None]:
        return self.source.merged_buffers(group)

    def weights_hash(self, shared_only: bool = False) -> str:
        return self.source.weights_hash(shared_only)


@dataclass(frozen=True)
class StepSettings:
    """The run file's settings that affect an update."""

    train: TrainConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    seed: int = 0
    """Seed of everything random in the run."""
    used: Mapping[Feature, Any] = field(default_factory=dict)
    """Features that the run file uses and that do not work with everything, with their values."""

    def features(self) -> dict[Feature, Any]:
        """A copy of ``used``, to which a backend adds the task's features."""
        return dict(self.used)
