"""The places where a run's checkpoints may be: snapshot tiers on the nodes, the run folder, an object store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.contents import Contents
from hpctrain.checkpoint.reading import Loaded, NotUsed
from hpctrain.comm.step_vote import StepVote
from hpctrain.run.events import Event
from hpctrain.system.array_types import Bytes
from hpctrain.train.hooks import Training
from hpctrain.train.state import StateTensor


class CheckpointPlace:
    """One of the places. All ranks call each method; by default there is nothing there, and nothing to do.

    Methods that return events or sentences return what the user should see.
    """

    lost: Sequence[NotUsed] = ()
    """Checkpoints that are missing shards, once ``found`` has looked."""

    def found(self, has_other: bool) -> Sequence[Path]:
        """Folders of the checkpoints there, which may have no files on this node before ``fetch``.

        Args:
            has_other: whether places that were asked before have a checkpoint.

        Raises:
            UnreadableCheckpoint: they cannot be listed, and may be the only ones.
        """
        return ()

    def fetch(self, folder: Path) -> None:
        """Get the missing files of a folder, if it is one of ``found``. Raises DamagedCheckpoint, UnreadableCheckpoint,
        on all ranks."""

    def place_of(self, folder: Path) -> tuple[str, str] | None:
        """The tier's name, and where a folder of ``found`` is, for messages; None for other folders."""

    def take_over(self, loaded: Loaded | None, fresh: bool, allocate: Callable[[int], Bytes]) -> Iterable[str]:
        """Begin to keep this attempt's checkpoints; of older ones, at least the one resumed from is kept.

        Args:
            loaded: the checkpoint that the run resumed from, wherever it was.
            fresh: the run starts over.
            allocate: allocates staging memory.
        """
        return ()

    def prepare(self, tensors: Sequence[StateTensor]) -> None:
        """Allocate staging memory before the first save. Raises MemoryError, OSError, RunFailed."""

    def snapshot(self, training: Training, contents: Contents, is_best: bool) -> None:
        """Begin the snapshots that are due."""

    def vote(self) -> dict[str, Any]:
        """This rank's fields of a StepVote."""
        return {}

    def advance(self, agreed: StepVote, step: int) -> Iterable[Event | str]:
        """Advance what is in flight; ``step`` is the run's current step."""
        return ()

    def offer(self, step: int, folder: Path) -> None:
        """Copy a checkpoint of the run folder, if one is due."""

    def protect(self, steps: Collection[int]) -> set[int]:
        """Keep these steps; returns the steps whose files in the run folder are still needed."""
        return set()

    def finish(self, step: int, folder: Path, wait_s: float) -> Iterable[Event | str]:
        """The run ends with this checkpoint in its folder: wait up to ``wait_s`` for copies of it."""
        return ()

    def close(self) -> None:
        """End the threads."""
