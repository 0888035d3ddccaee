"""Copies of a run's checkpoints outside the run folder: snapshots on the nodes, and an object store."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.contents import Contents
from hpctrain.checkpoint.reading import Loaded, NotUsed
from hpctrain.checkpoint.remote import Remote
from hpctrain.checkpoint.reporter import Reporter
from hpctrain.checkpoint.resume import RunFolder, Source
from hpctrain.checkpoint.tiers import Tiers
from hpctrain.comm.step_vote import StepVote
from hpctrain.run.events import SnapshotSaved
from hpctrain.train.hooks import Training
from hpctrain.train.state import StateTensor


@dataclass(frozen=True)
class Copies:
    """The places besides the run folder. All ranks call each method."""

    reporter: Reporter
    tiers: Tiers | None = None
    """Snapshot tiers on the nodes."""
    remote: Remote | None = None
    """Object store to which checkpoints are copied."""

    def sources(self, folder: RunFolder) -> list[Source]:
        """Where to look for checkpoints, in order of preference; only in the run folder if the run starts over."""
        places = (None, folder, None) if folder.fresh else (self.tiers, folder, self.remote)
        return [place for place in places if place]

    @property
    def lost(self) -> list[NotUsed]:
        """Snapshots that are missing shards."""
        return self.tiers.lost if self.tiers else []

    def open_tiers(self, loaded: Loaded | None, allocate: Callable[[int], NDArray[np.uint8]]) -> None:
        """Keep only the snapshot resumed from, and begin to take others."""
        if self.tiers:
            self.reporter.say(self.tiers.take_over(loaded.path if loaded else None, allocate))

    def open_store(self, loaded: Loaded | None, fresh: bool, is_local: bool) -> None:
        """Begin to send checkpoints to the object store, first the one resumed from, if it is of the run folder."""
        if self.remote:
            self.remote.take_over(loaded.step if loaded else None, fresh)
            if loaded and is_local:
                self.remote.offer(loaded.step, loaded.path)

    def prepare(self, tensors: list[StateTensor]) -> None:
        """Allocate staging memory before the first snapshot. Raises MemoryError, OSError, RunFailed."""
        if self.tiers:
            self.tiers.prepare(tensors)

    def advance(self, agreed: StepVote, step: int) -> None:
        """Advance what is in flight, and report what has ended; a tier that fails is disabled for this attempt."""
        if self.remote:
            self.reporter.report(*self.remote.advance(agreed, step))
        for tier, outcome in self.tiers.advance(agreed.tiers) if self.tiers else ():
            if outcome.is_final:
                outcome.path_or_raise()
            if outcome.error:
                self.reporter.say([f"checkpoint.tiers.{tier} is not used any more: {outcome.error}"])
                continue
            bytes_, stall_s, write_s = outcome.num_bytes, outcome.stall_s, outcome.write_s
            saved = SnapshotSaved(step=outcome.step, tier=tier, bytes=bytes_, stall_s=stall_s, write_s=write_s)
            self.reporter.report(saved)

    def snapshot(self, training: Training, contents: Contents, is_best: bool) -> None:
        """Begin the snapshots that are due."""
        step = training.state.step
        if self.tiers and (savers := self.tiers.due(step)):
            tensors, meta = contents.now(training, is_best)
            meta = self.tiers.shared(meta)
            for saver in savers:
                saver.begin(tensors, step, meta, training.framework.host.synchronize)

    def votes(self) -> dict[str, Any]:
        """This rank's fields of a StepVote."""
        store = self.remote.vote() if self.remote else StepVote()
        tiers = self.tiers.vote() if self.tiers else ()
        return {"tiers": tiers, "store": store.store, "store_away": store.store_away}

    def offer(self, step: int, folder: Path) -> None:
        """Copy a checkpoint of the run folder to the object store, if it is due there."""
        if self.remote:
            self.remote.offer(step, folder)

    def protect(self, steps: Collection[int]) -> set[int]:
        """Keep these steps in the object store; returns the steps whose local files are still needed."""
        return self.remote.protect(steps) if self.remote else set()

    def finish(self, step: int, folder: Path, wait_s: float) -> None:
        """Wait until the object store has the last checkpoint, and remove the snapshots."""
        if self.remote:
            self.remote.offer(step, folder, is_last=True)
            self.reporter.report(*self.remote.finish(step, wait_s))
        if self.tiers:
            self.tiers.clear()

    def close(self) -> None:
        """End the threads."""
        for place in (self.tiers, self.remote):
            if place:
                place.close()
