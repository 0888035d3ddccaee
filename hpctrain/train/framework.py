"""What the loop needs of PyTorch or TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.data import Samples
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


class StepResult(Protocol):
    """What one update gave. Values may still be on a device: reading them waits for it."""

    def sums(self) -> Sums:
        """This rank's (sum, weight) of ``loss`` and, if known, ``grad_norm`` (weight 1)."""


class Framework(Protocol):
    """One model on this rank's device."""

    @property
    def name(self) -> str:
        """``torch`` or ``tensorflow``."""

    @property
    def leaves(self) -> Leaves:
        """What state of objects may hold: its tensors are the framework's."""

    @property
    def reducer_name(self) -> str | None:
        """What averages the gradients, such as ``mpi-node``; None while it is still to be measured."""

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients in fp32, before any compression."""

    @property
    def num_layers(self) -> int:
        """Layers of this rank's stage; 0 if the model is not shared out among stages."""

    @property
    def valueless(self) -> frozenset[str]:
        """Names of weights of the model, on whatever rank, that have no values before ``load``."""

    @property
    def gives_back(self) -> bool:
        """Whether memory that a step frees may go back to the kernel, and not to an allocator of its own."""

    @property
    def flops(self) -> Flops | None:
        """What training on a sample takes, once ``dry_call`` has counted it; None if it cannot be counted."""

    @property
    def meeting(self) -> Group | None:
        """Ranks that meet in each pass, so that all make equally many (see in_step.py); None if each makes its own."""

    def set_learning_rate(self, factors: Factors) -> None:
        """Multiplies the optimizer's own learning rates, as they were when the task was made; ``OwnRates`` leaves them.

        Raises UserError if there are not as many factors as parameter groups.
        """

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        """Forward, backward, exchange, update, over this rank's part of a global batch of ``global_samples`` samples.

        Raises NonFiniteLoss, on every rank, if no loss scaling is there to skip the step.
        """

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = ()) -> None:
        """Tries forward pass, loss and metrics on a batch, and leaves all state as it was. No other rank is needed.

        Evaluations are tried on a batch of each set of ``validation`` data; if none is given, on the same batch.

        Raises UserError naming the field of the task at fault, and the user's line.
        """

    def place(self, samples: Samples) -> Samples:
        """A batch in memory from which it reaches the device fastest; the loader's thread calls this ahead of use."""

    @property
    def meters(self) -> Mapping[str, Meter]:
        """The task's metrics that are no functions, by name."""

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        """This rank's (sum, weight) of the loss and of each metric that is a function, without training. The
        ``meters`` take in the batch, too."""

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        """Outputs, sample axis first; a model with one output names it ``output``."""

    def state(self) -> Sequence[StateTensor]:
        """All tensors that make the model, optimizer, EMA, loss scale and random states, in a fixed order."""

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes over values by the names that ``state`` gives; raises UserError naming what is missing or of another
        shape."""

    def reseed(self, step: int) -> None:
        """Begins this rank's random streams again, with others for each step at which that is done."""

    @property
    def other_names(self) -> Mapping[str, str]:
        """Further names of tensors that the model shares (tied weights), and the name by which ``state`` gives each."""

    def staging(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory of this size for ``copy_into``, to which copies from the device are fastest; zeros.

        Raises:
            MemoryError: there is not so much.
        """

    def synchronize(self) -> None:
        """Returns when all copies begun by ``copy_into`` are done."""

    def weights_hash(self, shared_only: bool = False) -> str:
        """SHA-256 over what this rank has of the model's parameters, in a fixed order, hexadecimal.

        Args:
            shared_only: of those that ranks have alike, not of layers and tables that are cut.
        """

    def close(self) -> None:
        """Releases what the framework holds outside Python's reach."""
