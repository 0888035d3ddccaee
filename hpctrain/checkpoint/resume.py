"""Resumes a run from the newest sound checkpoint, wherever it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.contents import Contents
from hpctrain.checkpoint.format.durable_files import REFUSED, reading_error
from hpctrain.checkpoint.initial import load_initial
from hpctrain.checkpoint.initial_match import WeightSource, first_names
from hpctrain.checkpoint.object_state import restore
from hpctrain.checkpoint.place import CheckpointPlace
from hpctrain.checkpoint.read_retry import retry_read
from hpctrain.checkpoint.reading import Loaded, load_newest, step_of
from hpctrain.checkpoint.reporter import Reporter, not_used
from hpctrain.checkpoint.resume_compat import differences, in_words, refuse_changes
from hpctrain.checkpoint.store import CheckpointStore, compare_model, load_framework
from hpctrain.config.sections import CheckpointConfig
from hpctrain.errors import UserError
from hpctrain.run import events
from hpctrain.system.array_types import Array
from hpctrain.train.framework import StateSource
from hpctrain.train.hooks import Training
from hpctrain.train.state import TrainState
from hpctrain.train.stateful import make_equal

REUNITED = ("sync.kind", "local", "every_step")
"""Entry of ``differences``: ranks had separate weights and optimizer state (local SGD) and now need equal ones."""


@dataclass(frozen=True)
class RunFolder(CheckpointPlace):
    """The run folder. Listing it removes what killed attempts left behind."""

    store: CheckpointStore
    fresh: bool = False
    """Start over: existing checkpoints are renamed, not used."""

    def found(self, has_other: bool) -> list[Path]:
        group = self.store.group
        steps = group.broadcast(tidy(self.store, self.fresh) if group.rank == 0 else None, "list the checkpoints")
        return [self.store.folder(step) for step in steps]


def resume(
    store: CheckpointStore,
    framework: StateSource,
    state: TrainState,
    identity: Mapping[str, Any],
    places: Sequence[CheckpointPlace] = (),
    init_from: str | None = None,
) -> Loaded | None:
    """Load the newest sound checkpoint into framework and state; returns None if there is none. Collective.

    Renames damaged checkpoints.

    Args:
        store: the run's checkpoints.
        framework: receives the arrays.
        state: receives the position.
        identity: what must not have changed; see ``resume_compat``.
        places: where checkpoints may be, the preferred ones at equal steps first; by default the run folder.
        init_from: see ``CheckpointStore.load_into``.

    Raises:
        UserError: the run file differs from the checkpoint's run.
        DamagedCheckpoint: there are checkpoints, but none is sound.
        UnreadableCheckpoint: a checkpoint cannot be read now; it stays where it is.
    """
    places = places or [RunFolder(store)]
    candidates: list[Path] = []
    for place in places:
        candidates += place.found(bool(candidates))
    if not candidates:
        return None
    candidates.sort(key=step_of, reverse=True)

    def take(loaded: Loaded) -> dict[str, Array]:
        if "identity" not in loaded.meta or "state" not in loaded.meta:
            fix = "choose another run_dir, or begin with --fresh"
            raise UserError(f"{loaded.path} is not from a training run", fix)
        refuse_changes(loaded.meta["identity"], identity, str(loaded.path))
        return load_framework(framework, loaded)

    def fetch(folder: Path) -> None:
        for place in places:
            place.fetch(folder)

    loaded = load_newest(candidates, store.group, store.peers, take, fetch, init_from)
    if store.group.rank == 0:
        for rejected in loaded.rejected:
            with suppress(OSError):  # it is skipped again at the next resume
                if rejected.path.parent == store.path:  # others are removed with their tier
                    store.put_aside(rejected.step, "damaged")
    if REUNITED in differences(loaded.meta["identity"], identity) and loaded.ranks == store.peers.size:
        make_equal(framework, store.peers)  # with another number of ranks, means were loaded
    if loaded.ranks != store.peers.size:  # otherwise the random streams would repeat those of the first steps
        framework.reseed(loaded.step)
    state.restore(loaded.meta["state"])
    return loaded


def tidy(store: CheckpointStore, fresh: bool) -> list[int]:
    """Remove leftovers, on rank 0; returns the steps to resume from. Raises UserError if access is denied."""

    def clear() -> None:
        try:
            store.sweep()
            for step in store.steps() if fresh else ():
                store.put_aside(step, "superseded")
        except OSError as error:
            if error.errno not in REFUSED:
                raise reading_error(error, store.path) from error
            fix = "make the folder readable and writable, or set run_dir to another one"
            raise UserError(f"{store.path} cannot be used: {error.strerror or error}", fix) from error

    retry_read(clear)
    return store.steps()


@dataclass(frozen=True)
class Start:
    """The start of a run: from the newest sound checkpoint, wherever it is, or from initial weights."""

    store: CheckpointStore
    contents: Contents
    config: CheckpointConfig
    reporter: Reporter
    places: Sequence[CheckpointPlace]
    """Where checkpoints may be; see ``resume``."""

    def begin(self, training: Training) -> tuple[Loaded | None, str | None]:
        """Load the state, and report from where; raises as ``resume``. Collective.

        Returns the checkpoint, if there is one, and the name of its tier, if the run folder does not have it.
        """
        framework, identity = training.framework, self.contents.identity
        loaded = resume(self.store, framework, training.state, identity, self.places, self.config.init_from)
        lost = [one for place in self.places for one in place.lost]
        if not loaded:
            self.reporter.report(map(not_used, lost))
            self._load_initial(training)
            return None, None
        known = filter(None, (place.place_of(loaded.path) for place in self.places))
        tier, path = next(known, (None, str(loaded.path)))
        passed_over = [*(one for one in lost if one.step > loaded.step), *loaded.rejected]
        rejected = tuple(events.Rejected(one.step, one.reason) for one in passed_over)
        resumed = events.Resumed(step=loaded.step, path=path, tier=tier, ranks=loaded.ranks, rejected=rejected)
        self.reporter.report([resumed, *changes(loaded, identity)])
        accepted = self.config.accept
        self.reporter.report(compare_model(framework, loaded, training.world.everyone, accepted))
        self.reporter.report(restore(self.contents.objects, loaded, framework.facts.leaves, self.store.peers, accepted))
        if loaded.source and self.config.frozen == "source":
            self.contents.leave_out(loaded.source.record, training)
        return loaded, tier

    def _load_initial(self, training: Training) -> None:
        """Load initial weights if the run file names some. Raises UserError if the model has none otherwise."""
        if self.config.init_from:
            source = WeightSource(self.config.init_from, self.config.init_rename, self.config.init_missing)
            world = training.world
            is_left = self.config.frozen == "source"
            match, record = load_initial(source, training.framework, world.pipeline, world.everyone, is_left)
            self.reporter.report([events.InitialWeights(step=0, path=source.path, **asdict(match))])
            if record:
                self.contents.leave_out(record, training)
        elif left := training.framework.facts.meta_init:
            raise UserError(
                f"{first_names(sorted(left))} of the model have no values: the task made them on "
                "the meta device, and there is no checkpoint to resume from",
                "set checkpoint.init_from to their values, or make the model with values",
            )


def changes(loaded: Loaded, identity: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on how this run differs from the one that was saved."""
    before, now = loaded.meta["identity"].get("code"), identity.get("code")
    if before and now and before != now:
        yield "the task's file has changed since this checkpoint was saved: the run continues with the new"
    if accepted := differences(loaded.meta["identity"], identity):
        yield f"not the run that was saved, as accepted: {in_words(accepted)}"
