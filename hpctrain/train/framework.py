"""What the loop needs of PyTorch or TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.config.combinations import Feature
from hpctrain.config.sections import ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.data.dataset import Samples
from hpctrain.train.flops import Flops
from hpctrain.train.metrics import Meter
from hpctrain.train.schedule import Factors
from hpctrain.train.state import StateTensor
from hpctrain.train.tree import Leaves

HostBatch = Mapping[str, NDArray[Any]]
"""A rank's part of a global batch: arrays with a leading sample axis."""

Sums = dict[str, tuple[float, float]]
"""(sum, weight) by name: add them up over batches and ranks, then divide."""


class NonFiniteLoss(Exception):
    """The loss or the averaged gradient is not finite; every rank raises it at the same step."""

    def __init__(self, ranks: Sequence[int], what: str = "the loss") -> None:
        super().__init__(f"{what} or its gradient is not finite on ranks {list(ranks)}")
        self.what = what
        """Which loss, for people."""
        self.ranks = list(ranks)
        """Data-group ranks whose own loss or gradient is at fault; empty if only the sum over ranks overflowed."""


def samples_of(batch: Mapping[str, Sized]) -> int:
    """How many samples a batch has: the length of its leading axis."""
    return len(next(iter(batch.values())))


def copied(batch: HostBatch) -> dict[str, NDArray[Any]]:
    """A copy of a batch, which a task may change in place."""
    return {name: np.array(array) for name, array in batch.items()}


class StepResult(Protocol):
    """What one update gave. Values may still be on a device: reading them waits for it."""

    def sums(self) -> Sums:
        """This rank's (sum, weight) of ``loss`` and, if known, ``grad_norm`` (weight 1)."""


@dataclass(frozen=True)
class Facts:
    """What is known of a framework and its model at some time."""

    name: str
    """``torch`` or ``tensorflow``."""
    leaves: Leaves
    """What state of objects may hold: its tensors are the framework's."""
    gradient_bytes: int
    """Of all gradients that are exchanged, in fp32, before any compression."""
    reducer_name: str | None = None
    """What averages the gradients, such as ``mpi-node``; None while it is still to be measured."""
    flops: Flops | None = None
    """What training on a sample takes, once ``dry_call`` has counted it; None if it cannot be counted."""
    num_layers: int = 0
    """Layers of this rank's stage; 0 if the model is not divided into stages."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors that the model shares (tied weights), and the name by which ``state`` gives each."""
    meta_init: frozenset[str] = frozenset()
    """Names of weights of the model, on any rank, that have no values before ``load``."""
    undeclared: Sequence[str] = ()
    """What the first updates have changed and ``state`` leaves out, for people, such as ``loss: calls``."""
    gives_back: bool = False
    """Whether memory that a step frees may go back to the kernel, and not to an allocator of the framework."""


class HostMemory(Protocol):
    """Memory of the host from and to which the device copies fastest."""

    def place(self, samples: Samples) -> Samples:
        """A batch in such memory; the loader's thread calls this ahead of use."""

    def staging(self, num_bytes: int, given: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Zeros for ``copy_into`` of state; memory that is ``given`` is used.

        Raises:
            MemoryError: there is not so much.
        """

    def synchronize(self) -> None:
        """Returns when all copies begun by ``copy_into`` are done."""


class Step(Protocol):
    """Trains the model."""

    @property
    def facts(self) -> Facts:
        """As they are now."""

    def set_learning_rate(self, factors: Factors) -> None:
        """Multiplies the optimizer's own learning rates, as they were when the task was made; ``OwnRates`` leaves them.

        Raises UserError if there are not as many factors as parameter groups.
        """

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        """Forward, backward, exchange, update, over this rank's part of a global batch of ``global_samples`` samples.

        Raises NonFiniteLoss, on every rank, if no loss scaling is there to skip the step.
        """

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = ()) -> None:
        """Tries forward pass, loss and metrics on a batch, and leaves all state as it was. No other rank is needed,
        unless there is a ``sync_group``.

        Evaluations are tried on a batch of each set of ``validation`` data; if none is given, on the same batch.

        Raises UserError naming the field of the task at fault, and the user's line.
        """


class Evaluator(Protocol):
    """Computes with the model as it is."""

    @property
    def meters(self) -> Mapping[str, Meter]:
        """The task's metrics that are not functions, by name."""

    @property
    def sync_group(self) -> Group | None:
        """Ranks that exchange something in each pass, so that all make equally many (see ``even_batches``); None if
        each makes its own."""

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        """This rank's (sum, weight) of the loss and of each metric that is a function, without training. The
        ``meters`` take in the batch, too."""

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        """Outputs, sample axis first; a model with one output names it ``output``."""


class State(Protocol):
    """The state of model and optimizer on this rank."""

    def state(self) -> Sequence[StateTensor]:
        """All tensors that make the model, optimizer, EMA, loss scale and random states, in a fixed order."""

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes over values by the names that ``state`` gives; raises UserError naming what is missing or of another
        shape."""

    def reseed(self, step: int) -> None:
        """Begins this rank's random streams again, with others for each step at which that is done."""

    def kept_random_state(self) -> AbstractContextManager[None]:
        """What the body draws changes no random number that this rank draws afterwards."""

    def weights_hash(self, shared_only: bool = False) -> str:
        """SHA-256 over what this rank has of the model's parameters, in a fixed order, hexadecimal.

        Args:
            shared_only: of replicated parameters only, not of layers and tables that are cut.
        """


class StateSource(State, Protocol):
    """The state, and where it is copied to."""

    @property
    def facts(self) -> Facts:
        """As they are now."""

    @property
    def host(self) -> HostMemory:
        """Where copies of the state go."""


class Framework(Step, Evaluator, StateSource, Protocol):
    """One model on this rank's device. Only who opens a framework needs all of it."""

    def close(self) -> None:
        """Releases what the framework holds outside Python's reach."""


class FrameworkOfParts:
    """What a framework leaves to two of its parts: see ``Evaluator`` and ``State``."""

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

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        return self.evaluator.predict(batch)

    def state(self) -> Sequence[StateTensor]:
        return self.source.state()

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.source.load(arrays)

    def reseed(self, step: int) -> None:
        self.source.reseed(step)

    def kept_random_state(self) -> AbstractContextManager[None]:
        return self.source.kept_random_state()

    def weights_hash(self, shared_only: bool = False) -> str:
        return self.source.weights_hash(shared_only)


@dataclass(frozen=True)
class StepSettings:
    """The sections of a run file that shape an update."""

    train: TrainConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    seed: int = 0
    """Of everything random in the run."""
    used: Mapping[Feature, Any] = field(default_factory=dict)
    """What the run file uses that does not work with everything."""

    def features(self) -> dict[Feature, Any]:
        """A copy of ``used``, to which a backend adds what a task uses."""
        return dict(self.used)
