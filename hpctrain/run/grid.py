"""The grid of ranks set by ``parallel``: which data, pipeline stage and tensor part each rank has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GridPlace:
    """A rank's coordinates in the grid."""

    data: int
    """Index of its part of the samples."""
    tensor: int
    """Index in its tensor group: its part of partitioned layers."""
    stage: int
    """Its pipeline stage."""


@dataclass(frozen=True)
class Grid:
    """The grid of ranks: the tensor index varies fastest, then the data index, then the stage, as in ``World``."""

    ranks: int
    """Total number of ranks."""
    tensor: int = 1
    """Size of the tensor groups."""
    pipeline: int = 1
    """Number of pipeline stages."""

    @property
    def data(self) -> int:
        """Number of data-parallel ranks or groups."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def is_plain(self) -> bool:
        """Whether each rank has the whole model, so that its number says everything."""
        return self.tensor * self.pipeline == 1

    def place(self, rank: int) -> GridPlace:
        """Returns the place of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        stage, data = divmod(rest, self.data)
        return GridPlace(data, tensor, stage)

    def label(self, rank: int) -> str:
        """Returns a rank's place, to follow its number: " (data 1, tensor 0)"; empty if the grid is plain."""
        if self.is_plain:
            return ""
        place = self.place(rank)
        stage = [f"stage {place.stage}"] if self.pipeline > 1 else []
        tensor = [f"tensor {place.tensor}"] if self.tensor > 1 else []
        return f" ({', '.join([*stage, f'data {place.data}', *tensor])})"

    def __str__(self) -> str:
        """Returns the grid as text, such as "tensor 2 x data 4"; empty if it is plain."""
        if self.is_plain:
            return ""
        axes = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1 or name == "data")


def grid_of(ranks: int, tensor: int | None, pipeline: int | None) -> Grid:
    """Returns the grid for sizes read from a file; a plain grid if they are missing or do not divide the ranks."""
    tensor, pipeline = max(tensor or 1, 1), max(pipeline or 1, 1)
    fits = ranks >= tensor * pipeline and ranks % (tensor * pipeline) == 0
    return Grid(ranks, tensor, pipeline) if fits else Grid(ranks)
