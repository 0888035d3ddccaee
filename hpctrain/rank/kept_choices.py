"""Choices that run.json keeps so that a resumed run does not measure them again, and a description of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.backends.torch.strategies.pipeline.stage_schedule import StageChoice
from hpctrain.data.dataset import Samples
from hpctrain.data.stream import Stream
from hpctrain.errors import RunFailed
from hpctrain.rank.batches import first_batch
from hpctrain.rank.problem import Problem
from hpctrain.rank.session import Session
from hpctrain.reduce.reducer_choice import Choice
from hpctrain.run.attempts import Attempts


@dataclass(frozen=True)
class KeptReducer:
    """The reducer that an earlier attempt chose by measuring, and how to record this attempt's choice."""

    name: str | None = None
    """Name of the reducer chosen for the same grid of ranks; None if there is none."""
    record: Callable[[Choice], object] | None = None
    """Records the choice that this attempt makes."""


def kept_reducer(session: Session) -> KeptReducer:
    """Returns the reducer that run.json records. Collective."""
    remembered = Remembered("reducer", "measures its reducers", session)
    return KeptReducer(remembered.choice().get("reducer"), lambda choice: remembered.note(choice.to_event()))


def stage_choice(problem: Problem, session: Session) -> StageChoice:
    """Returns how to assign layers to stages; their times are measured once per grid of ranks and kept. Collective."""
    remembered = Remembered("stages", "times its layers", session)

    def batch() -> Samples:
        with session.phase("read the batch that layers are timed on"):
            return first_batch(problem, session.world)

    def record(layers: Sequence[int], seconds: Sequence[float]) -> None:
        remembered.note({"layers": list(layers), "seconds": [round(each, 6) for each in seconds]})

    return StageChoice(batch, remembered.choice().get("layers", ()), record)


def note_data(problem: Problem, session: Session) -> None:
    """Records in run.json, on rank 0, which data the run trains on."""
    if session.world.rank == 0:
        samples = None if isinstance(problem.train, Stream) else len(problem.train)
        data = {"fingerprint": problem.fingerprint(), "samples": samples, "sources": problem.sources()}
        keep(session, "run.json does not say on what", data=data)


def note_nccl(settings: Mapping[str, str], session: Session) -> None:
    """Records version and variables of NCCL in run.json, on rank 0; warns if those of the last attempt were others."""
    if session.world.rank or not settings:
        return
    before: Mapping[str, str] = Attempts(session.folder).info().get("nccl") or settings
    changed = [name for name in sorted({*before, *settings}) if before.get(name) != settings.get(name)]
    if changed:
        said = ", ".join(f"{name} {before.get(name, 'unset')} -> {settings.get(name, 'unset')}" for name in changed)
        session.warn(f"NCCL differs from that of the last attempt ({said}): the last bits of sums may differ, too")
    keep(session, "run.json does not say with which NCCL", nccl=dict(settings))


def keep(session: Session, otherwise: str, **fields: Any) -> None:
    """Sets fields of run.json. If that fails, warns what follows (``otherwise``) and lets training continue."""
    try:
        Attempts(session.folder).update(**fields)
    except RunFailed as error:
        session.warn(f"{error.what}; training continues, {otherwise}")


@dataclass(frozen=True)
class Remembered:
    """A choice that run.json keeps for later attempts."""

    name: str
    """Name of the field in run.json."""
    does_again: str
    """What a resumed run does again if the choice was not stored, for the warning."""
    session: Session

    @property
    def grid(self) -> dict[str, int]:
        """Sizes of the rank grid, for which the choice holds."""
        world = self.session.world
        return {"ranks": world.size, "tensor": world.tensor.size, "pipeline": world.pipeline.size}

    def choice(self) -> dict[str, Any]:
        """Returns the choice of an earlier attempt with the same grid; empty if there is none. Collective."""
        world = self.session.world
        saved = (Attempts(self.session.folder).info().get(self.name) or {}) if world.rank == 0 else {}
        saved = world.everyone.broadcast(saved, f"learn the {self.name} of the earlier attempt")
        return saved if {"tensor": 1, "pipeline": 1, **saved}.items() >= self.grid.items() else {}

    def note(self, choice: Mapping[str, Any]) -> None:
        """Stores a choice, on rank 0."""
        if self.session.world.rank == 0:
            otherwise = f"a resumed run {self.does_again} again"
            keep(self.session, otherwise, **{self.name: {**self.grid, **choice}})
