"""The hook that resumes a training run from a checkpoint and saves checkpoints when due and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from hpctrain.checkpoint.contents import FIRST_STEPS, Contents, verify_replicated
from hpctrain.checkpoint.place import CheckpointPlace
from hpctrain.checkpoint.policy import Policy, Retention, policy_of
from hpctrain.checkpoint.remote import Remote, open_remote
from hpctrain.checkpoint.reporter import Reporter
from hpctrain.checkpoint.resume import RunFolder, Start
from hpctrain.checkpoint.save_schedule import SaveSchedule
from hpctrain.checkpoint.saver import Saver, SaveResult
from hpctrain.checkpoint.store import CheckpointStore, best_steps, open_saver
from hpctrain.checkpoint.tiers import Tiers, open_tiers
from hpctrain.comm.world import World
from hpctrain.config.sections import CheckpointConfig
from hpctrain.errors import RunFailed
from hpctrain.run import events
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import current_attempt
from hpctrain.system import foreign_text
from hpctrain.train.clock import Phase
from hpctrain.train.hooks import BaseHook, Hook, StopReason, Training
from hpctrain.train.stateful import HOOKS, Kept

STOP_S = 20.0
"""Limit on the wait for the object store if the run was asked to stop, because it may soon be killed."""


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
    saver: Saver = field(init=False)
    """Opened by ``before_fit``."""
    saved_step: int | None = field(default=None, init=False)
    """Step of the newest checkpoint in the run folder."""
    preparations: int = field(default=0, init=False)
    best_steps: dict[int, float | None] = field(default_factory=dict, init=False)
    """Checkpoints in flight that were the best when they began, and the watched metric there."""
    best_saved: set[int] = field(default_factory=set, init=False)
    """The best of the run folder."""

    def __post_init__(self) -> None:
        self.schedule = SaveSchedule(self.policy, self.config)
        own = Kept(f"{HOOKS}{self.name}", self.schedule)
        objects = [*self.state, own, *(Kept(f"{HOOKS}{hook.name}", hook) for hook in self.hooks)]
        self.contents = Contents(self.store.group, objects, self.identity)
        self.reporter = Reporter(self.store.group.rank == 0, self.report)
        self.places: list[CheckpointPlace] = [place for place in (self.remote, self.tiers) if place]
        self.opened = ExitStack()
        for place in self.places:
            self.opened.callback(place.close)

    def before_fit(self, training: Training) -> None:
        """Resume from the newest sound checkpoint, or load initial weights."""
        self.contents.begin(training)
        run_folder = RunFolder(self.store, self.fresh)
        preferred = (run_folder,) if self.fresh else (self.tiers, run_folder, self.remote)
        places = [place for place in preferred if place]
        loaded, tier = Start(self.store, self.contents, self.config, self.reporter, places).begin(training)
        staging = training.framework.host.staging
        self.saver = open_saver(self.store, writers(self.config.writers, training.world), staging)
        self.opened.callback(self.saver.close)
        if loaded:
            self.best_saved = best_steps(self.store)
        if loaded and not tier:
            self.saved_step = loaded.step
            self.saver.sound.add(loaded.step)
        for place in self.places:
            self.reporter.report(place.take_over(loaded, self.fresh, staging))
        self._protect()
        self.schedule.begin(is_due=tier is not None)  # then the run folder does not have this checkpoint yet

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """Request a checkpoint if the watched metric improved."""
        self.schedule.look(metrics)
        return None

    def after_hooks(self, training: Training) -> None:
        """Advance the checkpoint in flight, and start one that is due."""
        if warning := self.contents.undeclared(training):
            self.reporter.report([warning])
        agreed = training.ballot.agreed()
        self._settle(self.saver.advance(agreed.checkpoint))
        for place in self.places:
            self.reporter.report(place.advance(agreed, training.state.step))
        self._protect()
        if self.schedule.begins(training.state, agreed.checkpoint.due, self.saver.idle):
            self._begin(training)
            if self.config.mode == "sync":
                self._finish()
        elif self.preparations < FIRST_STEPS and self.saver.idle:
            self.preparations += 1
            tensors = self.contents.tensors(training)
            with suppress(MemoryError, OSError, RunFailed):  # the first save retries and reports the error
                self.saver.prepare(tensors)
                for place in self.places:
                    place.prepare(tensors)
        votes: dict[str, Any] = {}
        for place in self.places:
            place.snapshot(training, self.contents, self.schedule.is_best)
            votes |= place.vote()
        training.clock.mark(Phase.CHECKPOINT)
        is_late = self.reporter.is_first and self.schedule.is_late()
        training.ballot.cast(checkpoint=self.saver.vote(is_late), **votes)

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """Save the final state and wait until it is durable. Raises RunFailed if it cannot be saved.

        If the run was asked to stop, time is short: a checkpoint in flight is dropped unless it is the best so far.
        """
        step, is_requested = training.state.step, training.is_asked_to_stop
        self._settle(self.saver.advance(training.ballot.agreed().checkpoint))
        if is_requested and self.saved_step != step:
            self.saver.drop({*self.best_steps, step})
        self._finish()
        if self.saved_step != step:
            self._begin(training)
            self._settle(self.saver.finish()).path_or_raise()
        wait_s = self.config.tiers.store.wait_s
        wait_s = min(wait_s, STOP_S) if is_requested else wait_s
        for place in self.places:
            self.reporter.report(place.finish(step, self.store.folder(step), wait_s))

    def close(self) -> None:
        self.opened.close()

    def _finish(self) -> None:
        """Wait until nothing is in flight."""
        while not self.saver.idle:
            self._settle(self.saver.finish())

    def _begin(self, training: Training) -> None:
        """Take a snapshot of all state at this step and start to save it."""
        begin = time.monotonic()
        step = training.state.step
        synchronize = training.framework.host.synchronize
        tensors, meta = self.contents.now(training, self.schedule.is_best)
        if self.config.verify_replicated:
            verify_replicated(self.store.group, tensors, synchronize, step)
        self.saver.begin(tensors, step, meta, synchronize)
        if self.schedule.is_best:
            self.best_steps[step] = self.schedule.best
        self.schedule.begun(begin)

    def _settle(self, outcome: SaveResult | None) -> Any:
        """Report how a save ended. The run continues after a failure unless it is final (replaced, or NaN weights)."""
        if outcome is None or outcome.is_dropped:
            return outcome
        step, path = outcome.step, str(outcome.path)
        best = self.best_steps.get(step)
        self.best_steps = {other: value for other, value in self.best_steps.items() if other > step}
        if outcome.error:
            failures = self.schedule.failed(loses_best=best is not None and not self.best_steps)
            failed = events.CheckpointFailed(step=step, path=path, error=outcome.error, failures=failures)
            self.reporter.report([failed])
            return outcome.path_or_raise() if outcome.is_final else outcome
        self.saved_step = step
        if best is not None:
            self.best_saved = {step}
        stall_s = self.schedule.saved(outcome.write_s, best).stall_s
        write_s = outcome.write_s
        saved = events.CheckpointSaved(step=step, path=path, bytes=outcome.num_bytes, stall_s=stall_s, write_s=write_s)
        self.reporter.report([saved])
        for place in self.places:
            place.offer(step, outcome.path)
        self._protect()
        return outcome

    def _protect(self) -> None:
        """Protect from retention the best checkpoint and those not yet copied to the object store."""
        self.saver.protect(self.best_saved.union(*(place.protect(self.best_saved) for place in self.places)))


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
