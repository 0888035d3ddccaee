"""Choices that run.json keeps so that a resumed run does not measure them again, and a description of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.backends.torch.strategies.pipeline.stage_schedule import StageChoice
from hpctrain.comm.world import World
from hpctrain.data.dataset import Samples
from hpctrain.data.stream import Stream
from hpctrain.errors import RunFailed
from hpctrain.rank.batches import first_batch
from hpctrain.rank.problem import Problem
from hpctrain.rank.session import Session
from hpctrain.reduce.reducer_choice import Choice
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir


@dataclass(frozen=True)
class KeptReducer:
    """The reducer that an earlier attempt chose by measuring, and how to record this attempt's choice."""

    name: str | None = None
    """Name of the reducer chosen for the same grid of ranks; None if there is none."""
    record: Callable[[Choice], object] | None = None
    """Records the choice that this attempt makes."""


def kept_reducer(world: World, run_dir: RunDir, warn: Callable[[str], object]) -> KeptReducer:
    """Returns the reducer that run.json records. Collective."""
    remembered = Remembered("reducer", "measures its reducers", world, run_dir, warn)
    return KeptReducer(remembered.choice().get("reducer"), lambda choice: remembered.note(choice.to_event()))


def stage_choice(problem: Problem, session: Session, run_dir: RunDir) -> StageChoice:
    """Returns how to assign layers to stages; their times are measured once per grid of ranks and kept. Collective."""
    remembered = Remembered("stages", "times its layers", session.world, run_dir, session.warn)

    def batch() -> Samples:
        with session.phase("read the batch that layers are timed on"):
            return first_batch(problem, session.world)

    def record(layers: Sequence[int], seconds: Sequence[float]) -> None:
        remembered.note({"layers": list(layers), "seconds": [round(each, 6) for each in seconds]})

    return StageChoice(batch, remembered.choice().get("layers", ()), record)


def note_data(problem: Problem, session: Session, run_dir: RunDir) -> None:
    """Records in run.json, on rank 0, which data the run trains on."""
    if session.world.rank == 0:
        samples = None if isinstance(problem.train, Stream) else len(problem.train)
        data = {"fingerprint": problem.fingerprint(), "samples": samples, "sources": problem.sources()}
        keep(run_dir, session.warn, "run.json does not say on what", data=data)


def note_nccl(settings: Mapping[str, str], session: Session, run_dir: RunDir) -> None:
    """Records version and variables of NCCL in run.json, on rank 0; warns if those of the last attempt were others."""
    if session.world.rank or not settings:
        return
    before: Mapping[str, str] = Attempts(run_dir).info().get("nccl") or settings
    changed = [name for name in sorted({*before, *settings}) if before.get(name) != settings.get(name)]
    if changed:
        said = ", ".join(f"{name} {before.get(name, 'unset')} -> {settings.get(name, 'unset')}" for name in changed)
        session.warn(f"NCCL differs from that of the last attempt ({said}): the last bits of sums may differ, too")
    keep(run_dir, session.warn, "run.json does not say with which NCCL", nccl=dict(settings))


def keep(run_dir: RunDir, warn: Callable[[str], object], otherwise: str, **fields: Any) -> None:
    """Sets fields of run.json. If that fails, warns what follows (``otherwise``) and lets training continue."""
    try:
        Attempts(run_dir).update(**fields)
    except RunFailed as error:
        warn(f"{error.what}; training continues, {otherwise}")


@dataclass(frozen=True)
class Remembered:
    """A choice that run.json keeps for later attempts."""

    name: str
    """Name of the field in run.json."""
    does_again: str
    """What a resumed run does again if the choice was not stored, for the warning."""
    world: World
    run_dir: RunDir
    warn: Callable[[str], object]

    @property
    def grid(self) -> dict[str, int]:
        """Sizes of the rank grid, for which the choice holds."""
        return {"ranks": self.world.size, "tensor": self.world.tensor.size, "pipeline": self.world.pipeline.size}

    def choice(self) -> dict[str, Any]:
        """Returns the choice of an earlier attempt with the same grid; empty if there is none. Collective."""
        saved = (Attempts(self.run_dir).info().get(self.name) or {}) if self.world.rank == 0 else {}
        saved = self.world.everyone.broadcast(saved, f"learn the {self.name} of the earlier attempt")
        return saved if {"tensor": 1, "pipeline": 1, **saved}.items() >= self.grid.items() else {}

    def note(self, choice: Mapping[str, Any]) -> None:
        """Stores a choice, on rank 0."""
        if self.world.rank == 0:
            otherwise = f"a resumed run {self.does_again} again"
            keep(self.run_dir, self.warn, otherwise, **{self.name: {**self.grid, **choice}})
