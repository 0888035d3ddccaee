"""Fits behind ``hpctrain bench scaling``: ring allreduce and Amdahl's law, by least squares. Pure functions.

Ring allreduce of n bytes over p parties takes 2 (p - 1) alpha + 2 (p - 1) / p n / beta (Patarasuk and Yuan 2009: no
algorithm moves fewer bytes; alpha and beta after Hockney 1994). Ranks of a node first add up among themselves, then
nodes exchange what the node's ranks share in sending: one ring inside, one between.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HUBER = 1.345
"""Misfit, in robust standard deviations, above which a sample is down-weighted (Huber 1964)."""


@dataclass(frozen=True, order=True)
class Shape:
    """Where ranks are."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{_count(self.nodes, 'node')} ({_count(self.ranks, 'rank')})"


@dataclass(frozen=True)
class Sample:
    """One measured exchange."""

    shape: Shape
    bytes: int
    """Of each rank's buffer."""
    seconds: float
    ring: bool = False
    """Whether nodes used our ring; otherwise MPI's Allreduce, with any algorithm."""


@dataclass(frozen=True)
class RingLink:
    """Constants of a ring."""

    alpha_s: float
    """Seconds of a message of no length."""
    s_per_byte: float
    """1 / bandwidth; the addition is part of it."""

    def seconds(self, parties: int, size: float) -> float:
        """Of an allreduce of ``size`` bytes."""
        messages, share = ring(parties)
        return messages * self.alpha_s + share * size * self.s_per_byte


@dataclass(frozen=True)
class ExchangeModel:
    """Rings inside a node and between nodes; None if not measured."""

    inside: RingLink | None = None
    between: RingLink | None = None

    def seconds(self, shape: Shape, size: float) -> float:
        """Of an allreduce of ``size`` bytes over ranks of this shape."""
        inside = self.inside.seconds(shape.ranks_per_node, size) if self.inside else 0.0
        return inside + (self.between.seconds(shape.nodes, size) if self.between else 0.0)


@dataclass(frozen=True)
class Amdahl:
    """serial + parallel / ranks (Amdahl 1967), seconds."""

    serial_s: float
    parallel_s: float

    @property
    def serial_fraction(self) -> float:
        """Of the time that one rank takes."""
        return self.serial_s / max(self.serial_s + self.parallel_s, 1e-30)

    def seconds(self, ranks: int) -> float:
        """Of a step."""
        return self.serial_s + self.parallel_s / ranks


def ring(parties: int) -> tuple[float, float]:
    """Sequential messages, and how often the buffer's bytes cross each link."""
    return 2.0 * (parties - 1), 2.0 * (parties - 1) / parties


def fit_exchange(samples: Sequence[Sample]) -> ExchangeModel:
    """Links from measured exchanges: inside from those on one node, between from the remaining time of the others."""
    on_one = [sample for sample in samples if sample.shape.nodes == 1 and sample.shape.ranks > 1]
    inside = _fit_link([(each.shape.ranks, each.bytes, each.seconds) for each in on_one])
    known = ExchangeModel(inside)
    spread = [
        (each.shape.nodes, each.bytes, max(each.seconds - known.seconds(each.shape, each.bytes), each.seconds / 10))
        for each in samples
        if each.shape.nodes > 1
    ]
    return ExchangeModel(inside, _fit_link(spread))


def fit_amdahl(ranks: Sequence[int], seconds: Sequence[float]) -> Amdahl:
    """Serial and parallel seconds, neither negative, from measured steps."""
    columns = np.array([[1.0, 1.0 / count] for count in ranks])
    serial, parallel = least_squares(columns, np.asarray(seconds, dtype=np.float64))
    return Amdahl(float(serial), float(parallel))


def least_squares(columns: Floats, values: Floats) -> Floats:
    """Non-negative solution of ``columns @ x = values``, least in relative residuals, outliers counting less.

    Args:
        columns: float64[samples, unknowns]; few unknowns: all sets of positive ones are tried.
        values: float64[samples], positive.
    """
    weights = 1.0 / values
    solution = _non_negative(columns * weights[:, None], values * weights)
    for _ in range(10):
        misfit = np.abs(columns @ solution / values - 1)
        spread = max(1.4826 * float(np.median(misfit)), 1e-6)
        weights = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(misfit, 1e-30))) / values
        solution = _non_negative(columns * weights[:, None], values * weights)
    return solution


def _non_negative(columns: Floats, values: Floats) -> Floats:
    count = columns.shape[1]
    best, least = np.zeros(count), float(values @ values)
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(1, count + 1)):
        part = np.linalg.lstsq(columns[:, chosen], values, rcond=None)[0]
        misfit = float(np.sum((columns[:, chosen] @ part - values) ** 2))
        if misfit < least and np.all(part >= 0):
            best, least = np.zeros(count), misfit
            best[list(chosen)] = part
    return best


def _fit_link(measured: Sequence[tuple[int, int, float]]) -> RingLink | None:
    """From (parties, bytes, seconds)."""
    if not measured:
        return None
    columns = np.array([[ring(parties)[0], ring(parties)[1] * size] for parties, size, _ in measured])
    alpha, s_per_byte = least_squares(columns, np.array([seconds for *_, seconds in measured]))
    return RingLink(float(alpha), float(s_per_byte))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
