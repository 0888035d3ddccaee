"""Formats bytes, seconds and numbers for tables and messages."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

SHARES = ("goodput", "mfu_median", "cost", "slowdown")
"""Fields that are fractions of a whole."""
VISIBLE_MFU = 0.001
"""Least utilisation of a device that is shown: below it, the model is a toy."""


def positive(text: str) -> int:
    """Parses a command's option as an integer of at least 1. Raises ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give 1 or more in place of {text}")
    return int(text)


def size(num_bytes: float) -> str:
    """Formats bytes: '512 B', '12.3 MiB' or '1.5 TiB'."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1023.95 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Formats seconds: '3.1 ms', '4.2 s', '3 min 05 s', '1 h 02 min' or '2 d 03 h'."""
    if abs(seconds) < 0.9995:
        milli = 1e3 * seconds
        if abs(milli) >= 10:
            return f"{milli:.0f} ms"
        return f"{milli:.2g} ms" if milli else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours = minutes // 60
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours} h {minutes % 60:02d} min" if hours else f"{minutes} min {rest:02d} s"


def number(value: float | None) -> str:
    """Formats a number with four significant digits; from 10,000 as a grouped integer."""
    if value is None or math.isnan(value):
        return "nan"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def quantity(key: str, value: object) -> str | None:
    """Formats a field whose name ends in its unit (``bytes``, ``stall_s``), or a share; None for other fields."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if key in SHARES:
        return f"{value:.1%}"
    if key.rpartition("_")[2] == "bytes":
        return size(value)
    is_time = key == "seconds" or (key.endswith("_s") and not key.endswith("_per_s"))
    return duration(value) if is_time else None


def numbers_in(text: str) -> list[int]:
    """Returns the numbers in a list as the kernel and Slurm write them: '0,2-3' gives [0, 2, 3]."""
    spans = [word.partition("-") for word in text.strip().split(",") if word]
    return [number for first, _, last in spans for number in range(int(first), int(last or first) + 1)]


def ranges(numbers: Iterable[int]) -> list[str]:
    """Formats numbers as ascending ranges: 0, 1, 2, 7 become '0-2' and '7'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
