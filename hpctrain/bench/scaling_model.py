"""Models the step time at any number of ranks: fits measurements and predicts with bounds. Pure functions.

A ring allreduce of n bytes over p parties takes 2 (p - 1) alpha + 2 (p - 1) / p n / beta (Patarasuk and Yuan 2009: no
algorithm moves fewer bytes; alpha and beta as in Hockney 1994). The ranks of a node first sum among themselves, then
nodes exchange the sums: one ring inside a node, one between nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HUBER = 1.345
"""Misfit, in robust standard deviations, above which a sample is down-weighted (Huber 1964)."""


@dataclass(frozen=True, order=True)
class Shape:
    """Numbers of nodes and of ranks per node."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{_count(self.nodes, 'node')} ({_count(self.ranks, 'rank')})"


@dataclass(frozen=True)
class Sample:
    """One measured exchange."""

    shape: Shape
    bytes: int
    """Size of each rank's buffer."""
    seconds: float
    ring: bool = False
    """Whether nodes used our ring; otherwise MPI's Allreduce, whatever its algorithm."""


@dataclass(frozen=True)
class RingLink:
    """Constants of a ring."""

    alpha_s: float
    """Latency: seconds of an empty message."""
    s_per_byte: float
    """1 / bandwidth, including the time of the addition."""

    def seconds(self, parties: int, size: float) -> float:
        """Seconds of an allreduce of ``size`` bytes."""
        messages, share = ring(parties)
        return messages * self.alpha_s + share * size * self.s_per_byte


@dataclass(frozen=True)
class ExchangeModel:
    """Rings inside a node and between nodes; None if not measured."""

    inside: RingLink | None = None
    between: RingLink | None = None

    def seconds(self, shape: Shape, size: float) -> float:
        """Seconds of an allreduce of ``size`` bytes over ranks of this shape."""
        inside = self.inside.seconds(shape.ranks_per_node, size) if self.inside else 0.0
        return inside + (self.between.seconds(shape.nodes, size) if self.between else 0.0)


@dataclass(frozen=True)
class Amdahl:
    """Step time as serial + parallel / ranks (Amdahl 1967), in seconds."""

    serial_s: float
    parallel_s: float

    @property
    def serial_fraction(self) -> float:
        """Serial fraction of the time on one rank."""
        return self.serial_s / max(self.serial_s + self.parallel_s, 1e-30)

    def seconds(self, ranks: int) -> float:
        """Seconds of a step."""
        return self.serial_s + self.parallel_s / ranks


def ring(parties: int) -> tuple[float, float]:
    """Number of sequential messages, and how many times the buffer crosses each link."""
    return 2.0 * (parties - 1), 2.0 * (parties - 1) / parties


def fit_exchange(samples: Sequence[Sample]) -> ExchangeModel:
    """Fits links: inside from exchanges on one node, between from the remaining time of the others."""
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
    """Fits non-negative serial and parallel seconds to measured steps."""
    columns = np.array([[1.0, 1.0 / count] for count in ranks])
    serial, parallel = least_squares(columns, np.asarray(seconds, dtype=np.float64))
    return Amdahl(float(serial), float(parallel))


def least_squares(columns: Floats, values: Floats) -> Floats:
    """Robust non-negative least squares for ``columns @ x = values`` in relative residuals, with Huber weights.

    Args:
        columns: float64[samples, unknowns]; few unknowns, since all subsets of positive ones are tried.
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
    """Fits a link to (parties, bytes, seconds)."""
    if not measured:
        return None
    columns = np.array([[ring(parties)[0], ring(parties)[1] * size] for parties, size, _ in measured])
    alpha, s_per_byte = least_squares(columns, np.array([seconds for *_, seconds in measured]))
    return RingLink(float(alpha), float(s_per_byte))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


Mode = Literal["weak", "strong"]

COMPUTE, EXCHANGE, DATA, REST = range(4)
PARTS = ("compute", "exchange", "data", "rest")
DRAWS = 200
BAND = (5, 95)
"""Percentiles of the draws that bound a prediction."""
MODEL_ERROR = 0.25
"""Relative error of an exchange at a shape that was not measured; tests/dist/test_bench_scaling.py checks it."""


@dataclass(frozen=True)
class Timing:
    """Steps of the training runs of one shape."""

    shape: Shape
    global_batch: int
    parts: Floats
    """float64[intervals, 4]: mean seconds per step of each of PARTS, by interval."""

    @property
    def typical(self) -> Floats:
        """float64[4]: seconds of each part, mean over the intervals between the quartiles of the step time.

        Unlike medians, these parts add up to the step.
        """
        steps = self.parts.sum(axis=1)
        low, high = np.percentile(steps, (25, 75))
        return np.asarray(self.parts[(steps >= low) & (steps <= high)].mean(axis=0))

    @property
    def step_s(self) -> float:
        """Typical seconds of a step."""
        return float(self.typical.sum())


@dataclass(frozen=True)
class StepGradients:
    """The gradients that a run exchanges."""

    bytes: int
    through_mpi: bool
    """Whether the run certainly uses the transport of the measured exchanges. Horovod may use a faster one (NCCL); the
    model then only provides the shape of the curve."""


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step at any shape."""

    own: Amdahl
    """The step without the exchange."""
    exchange: ExchangeModel
    gradients: StepGradients
    scale: float = 1.0
    """Ratio of the runs' exchange times to the model's, if they use a faster transport."""
    excess_s: float = 0.0
    """Exchange time of the runs beyond the model: waits for slower ranks; negative if backward hides some of it."""

    def exchange_s(self, shape: Shape) -> float:
        """Seconds of a step's exchange."""
        if shape.ranks == 1:
            return 0.0
        return max(0.0, self.scale * self.exchange.seconds(shape, self.gradients.bytes) + self.excess_s)

    def seconds(self, shape: Shape) -> float:
        """Seconds of a step."""
        return self.own.seconds(shape.ranks) + self.exchange_s(shape)


@dataclass(frozen=True)
class Prediction:
    """Expected step time and efficiency of one shape, with bounds."""

    shape: Shape
    step_s: float
    low_s: float
    high_s: float
    exchange_s: float
    efficiency: float
    low: float
    high: float
    """Bounds of the efficiency."""


def fit_steps(mode: Mode, timings: Sequence[Timing], exchange: ExchangeModel, gradients: StepGradients) -> StepModel:
    """Fits a step model to runs of several shapes.

    With weak scaling, a rank's own work stays as on the fullest nodes measured; with strong scaling it is divided.
    """
    fullest = max(timing.shape.ranks_per_node for timing in timings)
    own = [(timing, float(timing.step_s - timing.typical[EXCHANGE])) for timing in timings]
    full = [pair for pair in own if pair[0].shape.ranks_per_node == fullest]
    if mode == "weak":
        work = Amdahl(float(np.median([seconds for _, seconds in full])), 0.0)
    else:
        chosen = full if len(full) > 1 else own
        work = fit_amdahl([timing.shape.ranks for timing, _ in chosen], [seconds for _, seconds in chosen])
    most = max(timing.shape.nodes for timing in timings)
    spread = [each for each in timings if each.shape.nodes > 1 or most == 1]
    pairs = [(float(each.typical[EXCHANGE]), exchange.seconds(each.shape, gradients.bytes)) for each in spread]
    known = [(measured, model) for measured, model in pairs if model > 0]
    if not known:
        return StepModel(work, exchange, gradients)
    scale = float(np.median([measured / model for measured, model in known]))
    if scale < 1 and not gradients.through_mpi:
        return StepModel(work, exchange, gradients, scale=scale)
    excess = float(np.median([measured - model for measured, model in known]))
    return StepModel(work, exchange, gradients, excess_s=excess)


def predict(
    mode: Mode,
    timings: Sequence[Timing],
    samples: Sequence[Sample],
    gradients: StepGradients,
    shapes: Sequence[Shape],
    assumed: RingLink | None = None,
    seed: int = 0,
) -> list[Prediction]:
    """Predicts steps at the given shapes, with bounds. Measured shapes keep their measured step.

    The bounds come from DRAWS fits to resampled measurements (bootstrap), widened by the model's worst misfit at
    measured shapes and by MODEL_ERROR of the exchange. They do not cover effects absent from the measurements, such as
    slower upper-level switches or another algorithm of the MPI library.

    Args:
        mode: weak or strong scaling.
        timings: runs; the first is the base of the efficiency.
        samples: measured exchanges.
        gradients: the gradients that each step exchanges.
        shapes: shapes to predict.
        assumed: link between nodes, if none was measured.
        seed: seed of the draws.
    """
    best = _model(mode, timings, samples, gradients, assumed)
    generator = np.random.default_rng(seed)
    drawn = [
        _model(
            mode,
            [_redraw(timing, generator) for timing in timings],
            _redraw_samples(samples, generator),
            gradients,
            assumed,
        )
        for _ in range(DRAWS)
    ]
    base, measured = timings[0], {timing.shape: timing for timing in timings}
    fullest = max(timing.shape.ranks_per_node for timing in timings)
    fitting = [timing for timing in timings if mode == "strong" or timing.shape.ranks_per_node == fullest]
    misfit = max(abs(best.seconds(timing.shape) / timing.step_s - 1) for timing in fitting)
    found = []
    for shape in shapes:
        if shape in measured:
            timing = measured[shape]
            step, exchange, spread = timing.step_s, float(timing.typical[EXCHANGE]), 0.0
            draws = [_redraw(timing, generator).step_s for _ in range(DRAWS)]
        else:
            step, exchange, spread = best.seconds(shape), best.exchange_s(shape), misfit
            draws = [model.seconds(shape) for model in drawn]
        error = 0.0 if shape in measured else MODEL_ERROR * exchange
        low_s, high_s = np.percentile(draws, BAND)
        low = max(float(min(step, low_s)) / (1 + spread) - error, 1e-9)
        high = float(max(step, high_s)) * (1 + spread) + error
        mid, most, least = (efficiency(mode, base.shape, base.step_s, shape, each) for each in (step, low, high))
        found.append(Prediction(shape, step, low, high, exchange, mid, least, most))
    return found


def efficiency(mode: Mode, base: Shape, base_s: float, shape: Shape, step_s: float) -> float:
    """Speed per rank relative to the base; 1 is ideal."""
    ideal = base_s if mode == "weak" else base_s * base.ranks / shape.ranks
    return ideal / step_s


def _model(
    mode: Mode, timings: Sequence[Timing], samples: Sequence[Sample], gradients: StepGradients, assumed: RingLink | None
) -> StepModel:
    exchange = fit_exchange(samples)
    return fit_steps(mode, timings, ExchangeModel(exchange.inside, exchange.between or assumed), gradients)


def _redraw(timing: Timing, generator: np.random.Generator) -> Timing:
    rows = generator.integers(0, len(timing.parts), len(timing.parts))
    return Timing(timing.shape, timing.global_batch, timing.parts[rows])


def _redraw_samples(samples: Sequence[Sample], generator: np.random.Generator) -> list[Sample]:
    """Resamples within each shape and size."""
    groups: dict[tuple[Shape, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.shape, sample.bytes), []).append(sample)
    return [group[index] for group in groups.values() for index in generator.integers(0, len(group), len(group))]
