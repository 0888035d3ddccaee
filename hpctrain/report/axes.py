"""Round numbers for axes, and the map from values to pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """An axis from value ``low`` at pixel ``begin`` to value ``high`` at pixel ``end``."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False
    """Equal ratios of values are equally far apart; all are above 0."""

    def pixel(self, value: float) -> float:
        """Where a value lies."""
        low, value, high = (math.log(each) if self.log else each for each in (self.low, value, self.high))
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def value(self, pixel: float) -> float:
        """What lies at a pixel of a linear axis."""
        return self.low + (pixel - self.begin) / (self.end - self.begin) * (self.high - self.low)


def make_axis(values: Sequence[float], begin: float, end: float, from_zero: bool = False, most_ticks: int = 6) -> Axis:
    """A linear axis that holds all values and ends at round numbers."""
    low, high = (min(values), max(values)) if len(values) else (0.0, 1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
        pad = abs(high) / 10 or 1.0
        low, high = low - (0 if from_zero and low == 0 else pad), high + pad
    step = round_step((high - low) / most_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], begin, end, ticks)


def make_log_axis(values: Sequence[float], begin: float, end: float, most_ticks: int = 8) -> Axis:
    """A logarithmic axis that holds all values, which are above 0, and ends at 1, 2 or 5 times a power of ten."""
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    marks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    first = max(index for index, mark in enumerate(marks) if mark <= min(values) * (1 + 1e-9))
    last = min(index for index, mark in enumerate(marks) if mark >= max(values) * (1 - 1e-9) and index > first)
    ticks = marks[first : last + 1]
    return Axis(ticks[0], ticks[-1], begin, end, tuple(ticks[:: -(-len(ticks) // most_ticks)]), log=True)


def round_step(width: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``width``."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width * (1 - 1e-9))


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of a unit in which a span of time is a handy number, and the unit's name."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds > 2 * size:
            return size, name
    return 1.0, "seconds"


def label(value: float) -> str:
    """A tick in as few characters as possible: 1.5k, 20M, 0.002."""
    if value == 0:
        return "0"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if suffix == "k" else size
            return f"{value / unit:g}{suffix}"
    return f"{value:.6g}" if abs(value) >= 1e-3 else f"{value:.1e}"
