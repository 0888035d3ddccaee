"""Snapshots in the nodes' memory or on their local disks, which outlive the ranks and are read first on a restart.

A snapshot has the format of a checkpoint, but each node keeps only the shards of its ranks. A resume uses only
snapshots of the attempt that trained last (``trained`` in run.json) and of later ones.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.contents import Contents
from hpctrain.checkpoint.place import CheckpointPlace
from hpctrain.checkpoint.policy import Cost, Policy, Retention, policy_of_tier
from hpctrain.checkpoint.reading import Loaded, NotUsed, step_of
from hpctrain.checkpoint.replica import Replica, open_replica
from hpctrain.checkpoint.saver import Saver, SaveResult
from hpctrain.checkpoint.snapshots import ATTEMPT, MemoryStore, SnapshotStore, adopt, claim, home_name, sweep
from hpctrain.checkpoint.store import open_saver
from hpctrain.checkpoint.survivors import Snapshot, complete, survey
from hpctrain.comm.group import Group
from hpctrain.comm.step_vote import SaveVote, StepVote
from hpctrain.comm.world import World
from hpctrain.config.sections import CheckpointConfig
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import Event, SnapshotSaved
from hpctrain.system import shared_memory
from hpctrain.system.array_types import Bytes
from hpctrain.train.hooks import Training
from hpctrain.train.state import StateTensor

FAILURES = 3
"""Snapshots in a row that fail until a tier is given up: that a call fails once, or room is scarce, may pass."""


@dataclass
class Tier:
    """Snapshots in one location of the node: memory or scratch disk."""

    name: str
    policy: Policy
    home: Path
    """The run's folder."""
    store: SnapshotStore
    """This attempt's snapshots."""
    copies: int = 0
    """Number of copies on other nodes."""
    saver: Saver | None = None
    """None before the resume, and after FAILURES."""
    failed: int = 0
    """Snapshots in a row that have failed."""
    replica: Replica | None = None
    cost: Cost | None = None
    """Cost of the last snapshot."""
    last_s: float = field(default_factory=time.monotonic)
    is_due: bool = False

    def open(self, allocate: Callable[[int], Bytes], world: World) -> str | None:
        """Start to take snapshots. Returns why there are no copies, or None. Collective."""
        self.saver = open_saver(self.store, allocate=allocate)
        if not self.copies:
            return None
        self.replica, problem = open_replica(self.store, world)
        if self.replica:
            self.store.copy_by(self.replica.send)
        return problem

    def close(self) -> None:
        """End the threads; finished snapshots stay."""
        if self.replica:  # first, because the saver's thread may be waiting for it
            self.replica.close()
        if self.saver:
            self.saver.close()
            self.store.close()
        self.saver = self.replica = None

    def vote(self, decides: bool) -> SaveVote:
        """This rank's vote. A snapshot is due by the clock of the rank that decides."""
        if self.saver is None:
            return SaveVote(finished=True, sound=True)
        return self.saver.vote(decides and time.monotonic() - self.last_s >= self.policy.interval_s(self.cost))

    def advance(self, agreed: SaveVote) -> SaveResult | None:
        """Advance the snapshot in flight; returns its result if it ended."""
        self.is_due = self.is_due or agreed.due
        outcome = self.saver.advance(agreed) if self.saver else None
        if outcome:
            self.cost = Cost(outcome.stall_s, outcome.write_s)
            self.failed = self.failed + 1 if outcome.error else 0
            if self.failed == FAILURES:
                self.close()
        return outcome

    def due(self, step: int) -> Saver | None:
        """The saver, if it should begin a snapshot at this step."""
        self.is_due = self.is_due or self.policy.due_at(step, epoch=0, at_epoch_end=False)
        if not (self.is_due and self.saver and self.saver.idle):
            return None
        self.is_due, self.last_s = False, time.monotonic()
        return self.saver


@dataclass(eq=False)
class Tiers(CheckpointPlace):
    """A run's snapshot tiers, the fastest first. All ranks call each method."""

    tiers: Sequence[Tier]
    """In the order in which a resume searches them."""
    world: World
    attempts: Attempts
    """The run's attempts."""
    number: int
    """This attempt's number."""
    homes: Sequence[Path]
    """Folders in which earlier attempts of the run may have left snapshots."""
    firsts: Group
    """On each node's first rank, the group of these ranks."""
    snapshots: dict[Path, Snapshot] = field(default_factory=dict, init=False)
    """Snapshots that the nodes together have whole, by their folders on this node."""
    lost: list[NotUsed] = field(default_factory=list, init=False)
    """Snapshots that are missing shards."""

    def found(self, has_other: bool) -> list[Path]:
        """Folders of the snapshots that the nodes together have whole."""
        if not self.tiers:
            return []
        trained = self.attempts.info().get("trained") or 0 if self.world.rank == 0 else None
        trained = self.world.everyone.broadcast(trained, "find the attempt that trained last")
        found = survey(self.world, [tier.home for tier in self.tiers], trained)
        self.lost = []
        for it in found:
            place = self.place_of(it.folder)
            if it.lost and place:
                self.lost.append(NotUsed(step_of(it.folder), f"{place[0]}: {it.lost}", it.folder))
        self.snapshots = {it.folder: it for it in found if not it.lost}
        return list(self.snapshots)

    def fetch(self, folder: Path) -> None:
        """Copy missing shards of a snapshot to each node. Raises DamagedCheckpoint, on all ranks."""
        if folder in self.snapshots:
            complete(self.snapshots[folder], self.world, self.firsts)

    def place_of(self, folder: Path) -> tuple[str, str] | None:
        return next(((tier.name, str(folder)) for tier in self.tiers if tier.home in folder.parents), None)

    def take_over(self, loaded: Loaded | None, fresh: bool, allocate: Callable[[int], Bytes]) -> list[str]:
        """Remove all snapshots except the one resumed from, which becomes this attempt's; returns warnings to print."""
        resumed = loaded.path if loaded else None
        run_dir = self.attempts.run_dir.path
        node = self.world.node
        is_first = self.world.local_rank == 0
        if is_first:
            for home in self.homes:
                sweep(home, {tier.home for tier in self.tiers}, time.time())
        mine = self.tiers if is_first else ()
        problems = self._problems({tier.name: claim(tier.home, run_dir, node) for tier in mine})
        mine = [tier for tier in mine if tier.name not in problems]
        problems |= self._problems(
            {tier.name: adopt(tier.home, tier.store.path, resumed, run_dir, node) for tier in mine}
        )
        if self.world.rank == 0 and self.homes and (self.tiers or self.attempts.info().get("trained")):
            self.attempts.update(trained=self.number)  # from now on, snapshots that older attempts complete are ignored
        warnings = [f"checkpoint.tiers.{name} is not used: {problem}" for name, problem in problems.items()]
        for tier in self.tiers:
            if tier.name not in problems and (problem := tier.open(allocate, self.world)):
                warnings.append(f"checkpoint.tiers.{tier.name} has no copies: {problem}")
        return warnings

    def _problems(self, mine: Mapping[str, str | None]) -> dict[str, str]:
        """The problems of all nodes, by tier. Collective."""
        gathered = self.world.everyone.allgather(mine, "open the tiers")
        return {name: problem for each in gathered for name, problem in each.items() if problem}

    def prepare(self, tensors: Sequence[StateTensor]) -> None:
        for tier in self.tiers:
            if tier.saver and tier.saver.idle:
                tier.saver.prepare(tensors)

    def vote(self) -> dict[str, Any]:
        return {"tiers": tuple(tier.vote(decides=self.world.rank == 0) for tier in self.tiers)}

    def advance(self, agreed: StepVote, step: int) -> Iterator[Event | str]:
        """Advance the snapshots in flight. A tier that fails repeatedly is disabled for this attempt."""
        ended = [(tier, tier.advance(vote)) for tier, vote in zip(self.tiers, agreed.tiers, strict=False)]
        for tier, outcome in ended:  # none before the first vote
            name = tier.name
            if outcome is None:
                continue
            if outcome.is_final:
                outcome.path_or_raise()
            if outcome.error:
                left = "is not used any more" if tier.saver is None else f"lacks the snapshot of step {outcome.step}"
                yield f"checkpoint.tiers.{name} {left}: {outcome.error}"
                continue
            bytes_ = outcome.num_bytes
            stall_s = outcome.stall_s
            write_s = outcome.write_s
            yield SnapshotSaved(step=outcome.step, tier=name, bytes=bytes_, stall_s=stall_s, write_s=write_s)

    def snapshot(self, training: Training, contents: Contents, is_best: bool) -> None:
        step = training.state.step
        savers = list(filter(None, [tier.due(step) for tier in self.tiers]))
        if not savers:
            return
        tensors, meta = contents.now(training, is_best)
        if self.world.nodes > 1:  # each node stores rank 0's
            meta = self.world.everyone.broadcast(meta, "share a snapshot's meta")
        for saver in savers:
            saver.begin(tensors, step, meta, training.framework.host.synchronize)

    def finish(self, step: int, folder: Path, wait_s: float) -> tuple[()]:
        """Remove all snapshots, after the run folder has the newest state."""
        for tier in self.tiers:
            if tier.saver and not tier.saver.idle:
                if tier.replica:
                    tier.replica.close()
                tier.saver.drop(())
                tier.saver.finish()
        self.close()
        self.world.everyone.barrier("end their snapshots")
        if self.world.local_rank == 0:
            for home in self.homes:
                shutil.rmtree(home, ignore_errors=True)
        if self.world.rank == 0 and self.tiers:
            self.attempts.update(trained=self.number + 1)  # invalidates snapshots on nodes that are not in this attempt
        return ()

    def close(self) -> None:
        """End the threads; finished snapshots stay."""
        for tier in self.tiers:
            tier.close()


def open_tiers(
    config: CheckpointConfig, world: World, attempts: Attempts, number: int, fence: Callable[[], None]
) -> Tiers:
    """Create the tiers of a run file. Collective."""
    run = world.everyone.broadcast(home_name(attempts) if world.rank == 0 else None, "name the tiers' folders")
    tiers: list[Tier] = []
    homes: list[Path] = []
    memory, scratch = config.tiers.memory, config.tiers.scratch
    before = attempts.all() if world.rank == 0 else []
    places = (("memory", MemoryStore, memory, shared_memory.FOLDER), ("scratch", SnapshotStore, scratch, None))
    for name, kind, tier, default in places if run else ():
        place = tier.path or default
        if not place:
            continue
        home = Path(os.path.expandvars(place)) / run
        homes.append(home)
        if policy := policy_of_tier(tier.every_steps, config, before):
            folder = home / f"{ATTEMPT}{number:06d}"
            store = kind(folder, Retention(1), world.everyone, fence, world.data, world.tensor, world.local)
            tiers.append(Tier(name, policy, home, store, tier.copies))
    firsts = world.everyone.split("nodes' first ranks", world.local_rank) if tiers else Group("alone")
    return Tiers(tiers, world, attempts, number, homes, firsts)
