"""Resuming from the newest sound checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hpctrain.checkpoint.format.files import REFUSED, judged
from hpctrain.checkpoint.object_state import restore
from hpctrain.checkpoint.patience import patiently
from hpctrain.checkpoint.reading import Loaded, load_newest, step_of
from hpctrain.checkpoint.resume_compat import refuse_changes
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import UserError
from hpctrain.train.framework import StateSource
from hpctrain.train.state import TrainState
from hpctrain.train.stateful import HOOKS, STATE, Kept


def resume(
    store: CheckpointStore,
    framework: StateSource,
    state: TrainState,
    identity: Mapping[str, Any],
    fresh: bool = False,
    snapshots: Sequence[Path] = (),
    prepare: Callable[[Path], None] = lambda folder: None,
    remote: Sequence[Path] = (),
) -> Loaded | None:
    """Loads the newest sound checkpoint into framework and state; None if there is none. Collective.

    Removes what killed attempts left behind, and puts damaged checkpoints aside.

    Args:
        store: the run's checkpoints.
        framework: takes over the arrays.
        state: takes over the position.
        identity: what must not have changed; see ``resume_compat``.
        fresh: begin again: existing checkpoints are put aside, not used.
        snapshots: folders of checkpoints elsewhere; of equal steps they are taken before those of the store.
        prepare: see ``load_newest``.
        remote: folders that ``prepare`` fetches; of equal steps they are taken last.

    Raises:
        UserError: the run file asks for another run than the checkpoint's.
        DamagedCheckpoint: there are checkpoints, and none is sound.
        UnreadableCheckpoint: one cannot be read now; it stays where it is.
    """
    steps = store.group.broadcast(tidy(store, fresh) if store.group.rank == 0 else None, "list the checkpoints")
    candidates = [*snapshots, *map(store.folder, steps), *remote]
    if not candidates:
        return None
    candidates.sort(key=step_of, reverse=True)

    def take(loaded: Loaded) -> dict[str, NDArray[Any]]:
        if "identity" not in loaded.meta or "state" not in loaded.meta:
            fix = "choose another run_dir, or begin with --fresh"
            raise UserError(f"{loaded.path} is not from a training run", fix)
        refuse_changes(loaded.meta["identity"], identity, str(loaded.path))
        return load_framework(framework, loaded)

    loaded = load_newest(candidates, store.group, store.peers, take, prepare)
    if store.group.rank == 0:
        for rejected in loaded.rejected:
            with suppress(OSError):  # it is passed over again at the next resume
                if rejected.path.parent == store.path:  # else it is removed with its tier
                    store.put_aside(rejected.step, "damaged")
    if loaded.ranks != store.peers.size:  # streams as at the start would be those that the first steps have had
        framework.reseed(loaded.step)
    state.restore(loaded.meta["state"])
    return loaded


def load_framework(framework: StateSource, loaded: Loaded) -> dict[str, NDArray[Any]]:
    """Loads a framework's arrays, one at a time in memory, and returns those of objects."""
    framework.load(loaded.arrays)
    return {name: loaded.arrays[name] for name in loaded.arrays if name.startswith((HOOKS, STATE))}


def tidy(store: CheckpointStore, fresh: bool) -> list[int]:
    """Sweeps, on rank 0; returns the steps to resume from. Raises UserError if the folder may not be changed."""

    def clear() -> None:
        try:
            store.sweep()
            for step in store.steps() if fresh else ():
                store.put_aside(step, "superseded")
        except OSError as error:
            if error.errno not in REFUSED:
                raise judged(error, store.path) from error
            fix = "make the folder readable and writable, or set run_dir to another one"
            raise UserError(f"{store.path} cannot be used: {error.strerror or error}", fix) from error

    patiently(clear)
    return store.steps()


def load_weights(
    framework: StateSource, store: CheckpointStore, step: int | None = None, state: Sequence[Kept] = ()
) -> Loaded:
    """Loads a checkpoint, by default the newest sound one, to evaluate or predict with. Collective; changes no file.

    State that only one of task and checkpoint has is ignored.

    Raises:
        UserError: there is none, or it is of another model.
        DamagedCheckpoint: it is damaged.
    """
    loaded = store.load_into(lambda loaded: load_framework(framework, loaded), step)
    restore(state, loaded, framework.facts.leaves, store.peers, accepted=["state"])
    return loaded
