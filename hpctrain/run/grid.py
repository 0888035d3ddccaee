"""A run's ranks by their places in the grid of ``parallel``: which data, which stage, which part of the layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GridPlace:
    """Where a rank stands."""

    data: int
    """Which part of the samples it sees."""
    tensor: int
    """Which part of cut layers it has."""
    stage: int
    """Which layers it has."""


@dataclass(frozen=True)
class Grid:
    """Ranks by place: the tensor index varies fastest, then the data index, then the stage, as in ``World``."""

    ranks: int
    """All of them."""
    tensor: int = 1
    """Ranks among which layers are cut."""
    pipeline: int = 1
    """Stages, each of which has some of the layers."""

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def is_plain(self) -> bool:
        """Each rank has the whole model: its place is its number."""
        return self.tensor * self.pipeline == 1

    def place(self, rank: int) -> GridPlace:
        """Of one rank."""
        rest, tensor = divmod(rank, self.tensor)
        stage, data = divmod(rest, self.data)
        return GridPlace(data, tensor, stage)

    def told(self, rank: int) -> str:
        """A rank's place, to follow its number: " (data 1, tensor 0)"; empty if its number says it all."""
        if self.is_plain:
            return ""
        place = self.place(rank)
        stage = [f"stage {place.stage}"] if self.pipeline > 1 else []
        tensor = [f"tensor {place.tensor}"] if self.tensor > 1 else []
        return f" ({', '.join([*stage, f'data {place.data}', *tensor])})"

    def __str__(self) -> str:
        """For people: "tensor 2 x data 4"; empty if there is nothing to say."""
        if self.is_plain:
            return ""
        axes = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1 or name == "data")


def grid_of(ranks: int, tensor: int | None, pipeline: int | None) -> Grid:
    """A grid of what a file says, which may be nothing or nonsense: ranks that do not divide have no places."""
    tensor, pipeline = max(tensor or 1, 1), max(pipeline or 1, 1)
    fits = ranks >= tensor * pipeline and ranks % (tensor * pipeline) == 0
    return Grid(ranks, tensor, pipeline) if fits else Grid(ranks)
