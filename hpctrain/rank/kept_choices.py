"""What run.json keeps of a run: what it measures once, its reducer and the layers of its stages, and its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.comm.world import World
from hpctrain.data.dataset import Samples
from hpctrain.data.stream import Stream
from hpctrain.errors import RunFailed
from hpctrain.parallel.pipeline import StageChoice
from hpctrain.rank.batches import first_batch
from hpctrain.rank.problem import Problem
from hpctrain.rank.session import Session
from hpctrain.reduce.reducer_choice import Choice
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir


@dataclass(frozen=True)
class KeptReducer:
    """The reducer that a run has chosen by measuring."""

    name: str | None = None
    """Of an earlier attempt's choice for the same grid of ranks; None if there was none."""
    record: Callable[[Choice], object] | None = None
    """Keeps a choice that this attempt makes."""


def kept_reducer(world: World, run_dir: RunDir, warn: Callable[[str], object]) -> KeptReducer:
    """What run.json says. Collective."""
    remembered = Remembered("reducer", "measures its reducers", world, run_dir, warn)
    return KeptReducer(remembered.choice().get("reducer"), lambda choice: remembered.note(choice.to_event()))


def stage_choice(problem: Problem, session: Session, run_dir: RunDir) -> StageChoice:
    """How layers are assigned to stages: timed once in a run, for the same grid of ranks, and kept. Collective."""
    remembered = Remembered("stages", "times its layers", session.world, run_dir, session.warn)

    def batch() -> Samples:
        with session.phase("read the batch that layers are timed on"):
            return first_batch(problem, session.world)

    def record(layers: Sequence[int], seconds: Sequence[float]) -> None:
        remembered.note({"layers": list(layers), "seconds": [round(each, 6) for each in seconds]})

    return StageChoice(batch, remembered.choice().get("layers", ()), record)


def note_data(problem: Problem, session: Session, run_dir: RunDir) -> None:
    """Says what is trained on."""
    if session.world.rank == 0:
        samples = None if isinstance(problem.train, Stream) else len(problem.train)
        data = {"fingerprint": problem.fingerprint(), "samples": samples, "sources": problem.sources()}
        keep(run_dir, session.warn, "run.json does not say on what", data=data)


def keep(run_dir: RunDir, warn: Callable[[str], object], otherwise: str, **fields: Any) -> None:
    """Enters fields into run.json; what if that fails is said, and training continues."""
    try:
        Attempts(run_dir).update(**fields)
    except RunFailed as error:
        warn(f"{error.what}; training continues, {otherwise}")


@dataclass(frozen=True)
class Remembered:
    """A choice that run.json keeps for later attempts."""

    name: str
    """Of its field there."""
    does_again: str
    """What a resumed run does if it is lost, for people."""
    world: World
    run_dir: RunDir
    warn: Callable[[str], object]

    @property
    def grid(self) -> dict[str, int]:
        """That it was made for."""
        return {"ranks": self.world.size, "tensor": self.world.tensor.size, "pipeline": self.world.pipeline.size}

    def choice(self) -> dict[str, Any]:
        """Of an earlier attempt with the same grid; empty if there is none. Collective."""
        saved = (Attempts(self.run_dir).info().get(self.name) or {}) if self.world.rank == 0 else {}
        saved = self.world.everyone.broadcast(saved, f"learn the {self.name} of the earlier attempt")
        return saved if {"tensor": 1, "pipeline": 1, **saved}.items() >= self.grid.items() else {}

    def note(self, choice: Mapping[str, Any]) -> None:
        """On rank 0."""
        if self.world.rank == 0:
            otherwise = f"a resumed run {self.does_again} again"
            keep(self.run_dir, self.warn, otherwise, **{self.name: {**self.grid, **choice}})
