"""The hook that resumes a training run from a checkpoint and saves checkpoints when due and at the end."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint import reading
from hpctrain.checkpoint.export import MODEL
from hpctrain.checkpoint.format.durable_files import crc32
from hpctrain.checkpoint.format.layout import ITEM_TYPES, DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.checkpoint.initial import load_initial
from hpctrain.checkpoint.initial_match import WeightSource, listed
from hpctrain.checkpoint.object_state import OBJECTS, ObjectState, require_equal, restore, state_of
from hpctrain.checkpoint.policy import Cost, Policy, Retention, policy_of
from hpctrain.checkpoint.remote import Remote, open_remote
from hpctrain.checkpoint.resume_compat import config_hash, differences, in_words
from hpctrain.checkpoint.saver import Saver, SaveResult
from hpctrain.checkpoint.store import CheckpointStore, compare_model, open_saver, resume
from hpctrain.checkpoint.tiers import Tiers, open_tiers
from hpctrain.comm.group import Group
from hpctrain.comm.step_vote import SaveVote
from hpctrain.comm.world import World
from hpctrain.config.sections import CheckpointConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.run import events
from hpctrain.run.attempts import Attempt, Attempts, versions
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import current_attempt
from hpctrain.system import foreign_text
from hpctrain.train.clock import Phase
from hpctrain.train.hooks import BaseHook, Hook, StopReason, Training
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.stateful import HOOKS, Kept
from hpctrain.train.watchers import unreported

UNDECLARED = (
    "warning: checkpoints leave out what changes here: {}; if it is state, give its owner state_dict and "
    "load_state_dict, and list the owner in the task's state={{...}}"
)
STOP_S = 20.0
"""Limit on the wait for the object store if the run was asked to stop, because it may soon be killed."""
MOST_NAMED = 5
"""Limit on the names listed in UNDECLARED."""
PREPARATIONS = 2
"""Number of first steps after which the state is listed without a save, so that the layout is ready for the first save
and undeclared state is reported early. The task's own state is compared between ranks at these steps too."""


@dataclass(eq=False)
class CheckpointHook(BaseHook):
    """Resumes, saves and reports. Create it with ``checkpoint_hook``.

    At each step the ranks vote on the saves in flight, and on whether one is due by rank 0's clock; see ``StepVote``.
    """

    name = "checkpoint"

    store: CheckpointStore
    """Store over all ranks of the run."""
    policy: Policy
    """When to save."""
    config: CheckpointConfig
    """How to save."""
    identity: Mapping[str, Any]
    """What a resumed run must have in common with the checkpoint; see ``resume_compat``."""
    report: Callable[[events.Event], object]
    """Called with events on rank 0; does not raise."""
    hooks: Sequence[Hook] = ()
    """Hooks whose state is saved and restored; they run after this one."""
    fresh: bool = False
    """Start over instead of resuming."""
    state: Sequence[Kept] = ()
    """Further objects whose state is saved and restored."""
    tiers: Tiers | None = None
    """Snapshot tiers on the nodes."""
    remote: Remote | None = None
    """Object store to which checkpoints are copied."""
    saver: Saver | None = field(default=None, init=False)
    cost: Cost | None = field(default=None, init=False)
    constant: dict[str, Any] = field(default_factory=dict, init=False)
    last_s: float = field(default_factory=time.monotonic, init=False)
    stall_s: float = field(default=0.0, init=False)
    saved_step: int | None = field(default=None, init=False)
    preparations: int = field(default=0, init=False)
    compared: int = field(default=0, init=False)
    due: bool = field(default=False, init=False)
    is_best: bool = field(default=False, init=False)
    best: float | None = field(default=None, init=False)
    best_steps: set[int] = field(default_factory=set, init=False)
    best_saved: set[int] = field(default_factory=set, init=False)
    failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.objects = [*self.state, *(Kept(f"{HOOKS}{hook.name}", hook) for hook in (self, *self.hooks))]

    def before_fit(self, training: Training) -> None:
        """Resume from the newest sound checkpoint, or load initial weights."""
        leaves = training.framework.facts.leaves
        state_to_save(training, state_of(self.objects, leaves))  # raises now if something cannot be saved
        self.constant = {
            "identity": self.identity,
            "config_hash": config_hash(self.identity),
            "versions": versions(),
            "other_names": dict(training.framework.facts.other_names),
        }
        snapshots = self.tiers.found() if self.tiers and not self.fresh else ()
        run = (self.store, training.framework, training.state, self.identity, self.fresh)
        remote = self.remote.found(self._has_any(snapshots)) if self.remote and not self.fresh else ()
        loaded = resume(*run, snapshots, self._prepare, remote)
        staging = training.framework.host.staging
        self.saver = open_saver(self.store, writers(self.config.writers, training.world), staging)
        tier = self.tiers.tier_of(loaded.path) if self.tiers and loaded else None
        path = str(loaded.path) if loaded else ""
        if self.remote and loaded and self.remote.has(loaded.path):
            tier, path = "store", self.remote.url_of(loaded.step)
        lost = self.tiers.lost if self.tiers else []
        if not loaded:
            self._say(not_used(one) for one in lost)
        if self.tiers:
            self._say(self.tiers.take_over(loaded.path if loaded else None, staging))
        if loaded:
            if tier:
                self.due = True  # the run folder does not have this checkpoint yet
            else:
                self.saved_step = loaded.step
                self.saver.sound.add(loaded.step)
            self.best_saved = best_steps(self.store)
            passed_over = [*(one for one in lost if one.step > loaded.step), *loaded.rejected]
            rejected = tuple(events.Rejected(one.step, one.reason) for one in passed_over)
            self._report(events.Resumed(step=loaded.step, path=path, tier=tier, ranks=loaded.ranks, rejected=rejected))
            before, now = (each.get("code") for each in (loaded.meta["identity"], self.identity))
            if before and now and before != now:
                self._say(
                    ["the task's file has changed since this checkpoint was saved: the run continues with the new"]
                )
            if accepted := differences(loaded.meta["identity"], self.identity):
                self._say([f"not the run that was saved, as accepted: {in_words(accepted)}"])
            self._say(compare_model(training.framework, loaded, training.world.everyone, self.config.accept))
            self._say(restore(self.objects, loaded, leaves, self.store.peers, self.config.accept))
        elif self.config.init_from:
            source = WeightSource(self.config.init_from, self.config.init_rename, self.config.init_missing)
            world = training.world
            match = load_initial(source, training.framework, world.pipeline, world.everyone)
            self._report(events.InitialWeights(step=0, path=self.config.init_from, **dataclasses.asdict(match)))
        elif left := training.framework.facts.meta_init:
            raise UserError(
                f"{listed(sorted(left))} of the model have no values: the task made them on "
                "the meta device, and there is no checkpoint to resume from",
                "set checkpoint.init_from to their values, or make the model with values",
            )
        if self.remote:
            self.remote.take_over(loaded.step if loaded else None, self.fresh)
            if loaded and not tier:
                self.remote.offer(loaded.step, loaded.path)
        self._protect()
        self.last_s = time.monotonic()

    def _has_any(self, snapshots: Sequence[Path]) -> bool:
        """Whether rank 0 finds a checkpoint outside the object store."""
        return bool(snapshots or (self.store.group.rank == 0 and self.store.steps()))

    def _prepare(self, folder: Path) -> None:
        """Fetch missing parts of a checkpoint before it is read. Collective.

        Raises DamagedCheckpoint, UnreadableCheckpoint.
        """
        if self.tiers:
            self.tiers.complete(folder)
        if self.remote:
            self.remote.fetch(folder)

    def _protect(self) -> None:
        """Protect from retention the best checkpoint and those not yet copied to the object store."""
        assert self.saver is not None, "before_fit opens the saver"
        self.saver.protect(self.best_saved | (self.remote.protect(self.best_saved) if self.remote else set()))

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """Request a checkpoint if the watched metric improved."""
        if self.config.best_metric is None:
            return None
        if self.config.best_metric not in metrics:
            raise unreported("checkpoint.best_metric", self.config.best_metric, metrics)
        value, sign = metrics[self.config.best_metric], 1 if self.config.best_mode == "min" else -1
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best):
            self.best = value
            self.is_best = True
        return None

    def after_hooks(self, training: Training) -> None:
        """Advance the checkpoint in flight, and start one that is due."""
        assert self.saver is not None, "before_fit opens the saver"
        self._look_at_first_steps(training)
        agreed, state = training.ballot.agreed(), training.state
        self._settle(self.saver.advance(agreed.checkpoint))
        if self.remote:
            self._report(*self.remote.advance(agreed, state.step))
            self._protect()
        self._advance_tiers(agreed.tiers)
        by_position = self.policy.due_at(state.step, state.epoch, state.batch == 0)
        self.due = self.due or by_position or agreed.checkpoint.due
        if self.is_best or (self.due and self.saver.idle):  # the best state must be saved at this step
            self._begin(training)
            if self.config.mode == "sync":
                self._finish()
        elif self.preparations < PREPARATIONS and self.saver.idle:
            self.preparations += 1
            tensors = state_to_save(training, state_of(self.objects, training.framework.facts.leaves))
            with suppress(MemoryError, OSError, RunFailed):  # the first save retries and reports the error
                self.saver.prepare(tensors)
                if self.tiers:
                    self.tiers.prepare(tensors)
        if self.tiers and (savers := self.tiers.due(state.step)):
            tensors, meta = self._content(training)
            meta = self.tiers.shared(meta)
            for saver in savers:
                saver.begin(tensors, state.step, meta, training.framework.host.synchronize)
        training.clock.mark(Phase.CHECKPOINT)
        is_late = self.store.group.rank == 0 and time.monotonic() - self.last_s >= self._interval_s()
        tiers = self.tiers.vote() if self.tiers else ()
        training.ballot.cast(checkpoint=self.saver.vote(is_late), tiers=tiers)
        if self.remote:
            away = self.remote.vote()
            training.ballot.cast(store=away.store, store_away=away.store_away)

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """Save the final state and wait until it is durable. Raises RunFailed if it cannot be saved.

        If the run was asked to stop, time is short: a checkpoint in flight is dropped unless it is the best so far.
        """
        assert self.saver is not None, "before_fit opens the saver"
        self._settle(self.saver.advance(training.ballot.agreed().checkpoint))
        if reason is StopReason.REQUESTED and self.saved_step != training.state.step:
            self.saver.drop(self.best_steps | {training.state.step})
        self._finish()
        if self.saved_step != training.state.step:
            self._begin(training)
            self._settle(self.saver.finish()).path_or_raise()
        if self.remote:
            self.remote.offer(training.state.step, self.store.folder(training.state.step), is_last=True)
            longest_s = self.config.tiers.store.wait_s
            wait_s = min(longest_s, STOP_S) if reason is StopReason.REQUESTED else longest_s
            self._report(*self.remote.finish(training.state.step, wait_s))
        if self.tiers:
            self.tiers.clear()

    def state_dict(self) -> dict[str, Any]:
        """The best value of the watched metric."""
        if self.config.best_metric is None:
            return {}
        return {"metric": self.config.best_metric, "mode": self.config.best_mode, "best": self.best}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the best value, unless it is of a different metric or mode."""
        if (saved["metric"], saved["mode"]) == (self.config.best_metric, self.config.best_mode):
            self.best = saved["best"]

    def close(self) -> None:
        if self.saver:
            self.saver.close()
        if self.tiers:
            self.tiers.close()
        if self.remote:
            self.remote.close()

    def _look_at_first_steps(self, training: Training) -> None:
        """In the first steps, compare state that must be equal on all ranks, and warn of undeclared state.

        Collective.
        """
        if self.compared == PREPARATIONS:
            return
        self.compared += 1
        require_equal(self.store.group, self.objects, training.framework.facts.leaves, training.state.step)
        training.framework.state()  # lets the framework detect undeclared changes
        if self.compared == PREPARATIONS:
            left_out = self.store.group.allgather(training.framework.facts.undeclared, "name what is not saved")
            if names := dict.fromkeys(name for of_rank in left_out for name in of_rank):
                self._say(
                    [UNDECLARED.format(", ".join(list(names)[:MOST_NAMED]) + ", ..." * (len(names) > MOST_NAMED))]
                )

    def _interval_s(self) -> float:
        """Seconds from the last save to the next one by the clock."""
        interval_s = self.policy.interval_s(self.cost)
        return min(interval_s, self.policy.retry_s(self.failures, self.stall_s)) if self.failures else interval_s

    def _finish(self) -> None:
        """Wait until nothing is in flight."""
        assert self.saver is not None, "before_fit opens the saver"
        while not self.saver.idle:
            self._settle(self.saver.finish())

    def _begin(self, training: Training) -> None:
        """Take a snapshot of all state at this step and start to save it."""
        assert self.saver is not None, "before_fit opens the saver"
        begin = time.monotonic()
        framework, step = training.framework, training.state.step
        tensors, meta = self._content(training)
        if self.config.verify_replicated:
            verify_replicated(self.store.group, tensors, framework.host.synchronize, step)
        self.saver.begin(tensors, step, meta, framework.host.synchronize)
        if self.is_best:
            self.best_steps.add(step)
        self.due = self.is_best = False
        self.last_s = time.monotonic()
        self.stall_s = self.last_s - begin

    def _content(self, training: Training) -> tuple[list[StateTensor], dict[str, Any]]:
        """The tensors and meta to save at this step. Collective."""
        framework = training.framework
        objects = state_of(self.objects, framework.facts.leaves)
        tensors = state_to_save(training, objects)
        meta = {
            "state": training.state.to_json(),
            OBJECTS: objects.placements,
            "framework": framework.facts.name,
            "best": self.is_best,
            "time": time.time(),
            "trained": trained_alone(tensors, training.world.pipeline),
            **self.constant,
        }
        return tensors, meta

    def _advance_tiers(self, agreed: Sequence[SaveVote]) -> None:
        """Advance the tiers' snapshots and report those that ended; a tier that fails is disabled for this attempt."""
        for tier, outcome in self.tiers.advance(agreed) if self.tiers else ():
            if outcome.is_final:
                outcome.path_or_raise()
            if outcome.error:
                self._say([f"checkpoint.tiers.{tier} is not used any more: {outcome.error}"])
                continue
            bytes_, stall_s, write_s = outcome.num_bytes, outcome.stall_s, outcome.write_s
            self._report(
                events.SnapshotSaved(step=outcome.step, tier=tier, bytes=bytes_, stall_s=stall_s, write_s=write_s)
            )

    def _settle(self, outcome: SaveResult | None) -> Any:
        """Report how a save ended. The run continues after a failure unless it is final (replaced, or NaN weights)."""
        if outcome is None:
            return None
        path = str(outcome.path)
        if outcome.is_dropped:
            return outcome
        if outcome.error:
            self.failures += 1
            self.last_s = time.monotonic()
            failures = self.failures
            self._report(events.CheckpointFailed(step=outcome.step, path=path, error=outcome.error, failures=failures))
            return outcome.path_or_raise() if outcome.is_final else outcome
        self.failures = 0
        self.saved_step = outcome.step
        if outcome.step in self.best_steps and self.saver:
            self.best_saved = {outcome.step}
            self.best_steps = {step for step in self.best_steps if step > outcome.step}
        self.cost = Cost(outcome.write_s if self.config.mode == "sync" else self.stall_s, outcome.write_s)
        saved = events.CheckpointSaved(
            step=outcome.step, path=path, bytes=outcome.num_bytes, stall_s=self.cost.stall_s, write_s=outcome.write_s
        )
        self._report(saved)
        if self.remote:
            self.remote.offer(outcome.step, outcome.path)
        self._protect()
        return outcome

    def _report(self, *given: events.Event) -> None:
        """Report events and print their lines, on rank 0."""
        for event in given if self.store.group.rank == 0 else ():
            self._say(lines_about(event))
            self.report(event)

    def _say(self, lines: Iterable[str]) -> None:
        """Print lines for the user, on rank 0."""
        if self.store.group.rank == 0:
            with suppress(OSError):  # the job's output may be on the full disk
                for line in lines:
                    foreign_text.show(line)


def state_to_save(training: Training, objects: ObjectState) -> list[StateTensor]:
    """State of framework and objects. Objects' rank-local state, equal on all pipeline stages, comes from the first."""
    is_first = training.world.pipeline.rank == 0
    own = [tensor for tensor in objects.tensors if is_first or tensor.placement is not Placement.RANK]
    return [*training.framework.state(), *own]


def trained_alone(tensors: Iterable[StateTensor], stages: Group | None = None) -> list[str] | None:
    """Names of the trained weights if others are frozen, as with an adapter; None if all are trained. Collective."""
    equal = (Placement.REPLICATED, Placement.CUT)
    own = {it.name: it.is_trained for it in tensors if it.name.startswith(MODEL) and it.placement in equal}
    everywhere = (stages or Group("alone")).allgather(own, "name the weights that are trained")
    weights = {name: is_trained for each in everywhere for name, is_trained in each.items()}
    return None if all(weights.values()) else [name for name, is_trained in weights.items() if is_trained]


def not_used(one: events.Rejected | reading.NotUsed) -> str:
    """Message that says why a checkpoint was not used."""
    return f"checkpoint of step {one.step} is not used: {one.reason}"


def lines_about(event: events.Event) -> Iterator[str]:
    """Lines to print for events that the user must not miss."""
    if isinstance(event, events.CheckpointFailed):
        yield f"checkpoint of step {event.step} FAILED: {event.error}; older checkpoints are intact"
        if (event.failures or 0) > 1:
            yield f"{event.failures} CHECKPOINTS IN A ROW FAILED: what was trained since the last is not saved"
    if isinstance(event, events.Resumed):
        for rejected in event.rejected:
            yield not_used(rejected)
        yield f"resumed from step {event.step}: {event.path}{f' ({event.tier})' if event.tier else ''}"
    if isinstance(event, events.StoreAway):
        yield f"checkpoints do not reach {event.path}: {event.error}; the run folder has them"
    if isinstance(event, events.InitialWeights):
        yield f"{len(event.taken)} weights were taken from {event.path}"
        for kind, names in (("missing", event.missing), ("unexpected", event.unexpected), ("reshaped", event.reshaped)):
            if names:
                yield f"{kind}: {', '.join(names)}"


def gone_since(attempts: Sequence[Attempt]) -> str:
    """A message if the previous attempt's checkpoint is gone, since file systems purge old files; else empty."""
    before, now = attempts[-2:] if len(attempts) > 1 else (Attempt(), Attempt())
    is_gone = before.to_step is not None and now.from_step is None
    return f"the checkpoint of step {before.to_step}, which attempt {before.number} left, is gone" if is_gone else ""


def checkpoint_hook(
    config: CheckpointConfig,
    identity: Mapping[str, Any],
    world: World,
    run_dir: RunDir,
    report: Callable[[events.Event], object],
    hooks: Sequence[Hook] = (),
    fresh: bool = False,
    state: Sequence[Kept] = (),
) -> CheckpointHook:
    """Create the checkpoint hook of a run. Collective.

    Args:
        config: when and how to save.
        identity: what a resumed run must have in common; see ``resume_compat.identity_of``.
        world: the ranks.
        run_dir: holds the checkpoints, and the fence between attempts.
        report: called with events on rank 0; does not raise.
        hooks: hooks whose state is saved and restored.
        fresh: start over even if there are checkpoints.
        state: further objects whose state is saved and restored.
    """
    kept = Retention(config.keep_last, config.keep_every_steps)
    attempt = current_attempt()
    fence = lambda: Attempts(run_dir).check_fence(attempt)  # noqa: E731
    store = CheckpointStore(run_dir.checkpoints, kept, world.everyone, fence, world.data, world.tensor)
    tiers = open_tiers(config, world, Attempts(run_dir), attempt, fence)
    attempts = Attempts(run_dir).all() if world.rank == 0 else []
    if not fresh and (purged := gone_since(attempts)):
        foreign_text.show(f"{purged}; unless there is a copy, training begins again")
    policy = policy_of(config, attempts)
    remote = open_remote(config.tiers.store, run_dir.checkpoints, world.everyone, kept, fence)
    return CheckpointHook(store, policy, config, identity, report, hooks, fresh, state, tiers, remote)


def writers(mode: str, world: World) -> list[int]:
    """Ranks that write replicated state, for ``checkpoint.writers``. Collective."""
    local_ranks = world.everyone.allgather(world.local_rank, "find the nodes' first ranks")
    if mode == "one":
        return [0]
    return [rank for rank, local_rank in enumerate(local_ranks) if mode == "all" or local_rank == 0]


def best_steps(store: CheckpointStore) -> set[int]:
    """The newest checkpoint marked best, and newer ones that cannot be read and may be it; empty except on rank 0."""
    found: set[int] = set()
    for step in reversed(store.steps()) if store.group.rank == 0 else ():
        try:
            if store.manifest(step).meta.get("best"):
                return found | {step}
        except DamagedCheckpoint:
            continue
        except (UnreadableCheckpoint, UserError):
            found.add(step)
    return found


def verify_replicated(group: Group, tensors: Sequence[StateTensor], synchronize: Callable[[], None], step: int) -> None:
    """Raise RunFailed, on all ranks, if a tensor that should be equal on all ranks is not. Collective; slow."""
    sums = {}
    for tensor in tensors:
        if tensor.placement in (Placement.REPLICATED, Placement.FIRST):
            value = np.empty(tensor.shape, ITEM_TYPES[tensor.dtype])
            tensor.copy_into(value)
            synchronize()
            sums[tensor.name] = crc32(value.tobytes())
    of_ranks = group.allgather(sums, "compare what should be equal")
    unequal = [name for name in sums if len({ranks_sums.get(name) for ranks_sums in of_ranks}) > 1]
    if unequal:
        fix = "look for code that runs on some ranks only, or for random numbers that ranks do not share"
        raise RunFailed(f"{len(unequal)} tensors differ between ranks at step {step}: {', '.join(unequal[:5])}", fix)
