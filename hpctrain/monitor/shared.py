"""Shared memory that a node's ranks write and its agent reads: a heartbeat and a ring of rows for each rank.

Each rank writes only its own slot and the agent only reads, so neither waits for the other. All numbers are float64.
A reader copies only published rows, then checks that the writer has not overwritten them in the meantime.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from dataclasses import dataclass

import numpy as np

from hpctrain.monitor.window import COLUMNS
from hpctrain.system import processes, shared_memory
from hpctrain.system.array_types import Floats

# Heartbeat: indexes of the first numbers of a slot.
PID, STARTED, STATE, STEPS, MARKED_AT, MARKED_PHASE, FIRST_STEP, DUMP_SIGNAL, DUMP_FILE, WAITS_FOR = range(10)
GPU_PLACE, PEAK_BYTES, RESERVED_BYTES = range(10, 13)
"""The rank's GPU (``place_of``; 0 without one), and the memory that its tensors used at most and that PyTorch holds."""
HEADER = 16
ROW = 16
assert COLUMNS <= ROW

JOINING, RUNNING, FINISHED = 0.0, 1.0, 2.0
"""Values of STATE."""
NO_PHASE = -1.0
"""Value of MARKED_PHASE before the first mark of a step."""
BETWEEN_BEATS = -2.0
"""Value of MARKED_PHASE in programs that mark no phases and only call ``heartbeat``."""


@dataclass(frozen=True)
class RingLayout:
    """Sizes of a node's shared memory."""

    ranks: int
    """Ranks on the node."""
    rows: int
    """Number of steps that a ring holds."""

    @property
    def slot(self) -> int:
        """Number of float64 values per rank."""
        return HEADER + ROW * self.rows

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return 8 * self.slot * self.ranks


def create(layout: RingLayout) -> tuple[int, str]:
    """Creates the memory. Returns its descriptor and path; the caller unlinks the path. Raises OSError."""
    folder = shared_memory.FOLDER if os.access(shared_memory.FOLDER, os.W_OK) else None
    return shared_memory.create([(0, layout.size)], folder)


class Slot:
    """One rank's part of the memory, for writing."""

    def __init__(self, memory: mmap.mmap, layout: RingLayout, local_rank: int) -> None:
        self.rows = layout.rows
        begin = 8 * layout.slot * local_rank
        self.head = memoryview(memory)[begin : begin + 8 * HEADER].cast("d")
        self.ring = memoryview(memory)[begin + 8 * HEADER : begin + 8 * layout.slot]

    def join(self) -> None:
        """Writes this process's identity and marks the rank as running."""
        self.head[PID] = os.getpid()
        self.head[STARTED] = processes.birth(os.getpid())
        self.head[MARKED_PHASE] = NO_PHASE
        self.head[MARKED_AT] = time.monotonic()  # otherwise silence would count from the host's boot
        self.head[STATE] = RUNNING


def place_of(pci: str) -> int:
    """A PCI address (domain:bus:device.function, in any width) as a number; 0 if it is empty."""
    domain, bus, device = re.split("[:.]", pci)[:3] if pci else ("0", "0", "0")
    return int(domain, 16) << 16 | int(bus, 16) << 8 | int(device, 16)


def own_slot() -> Slot:
    """Returns a slot in private memory, for a clock that no agent reads."""
    layout = RingLayout(ranks=1, rows=1)
    return Slot(mmap.mmap(-1, layout.size), layout, 0)


def map_memory(handle: int, layout: RingLayout) -> mmap.mmap:
    """Maps the memory into this process."""
    return mmap.mmap(handle, layout.size)


@dataclass(frozen=True)
class SlotReader:
    """All slots of a node, for reading."""

    numbers: Floats
    """[ranks, layout.slot]"""
    layout: RingLayout

    @classmethod
    def of(cls, handle: int, layout: RingLayout) -> SlotReader:
        """Maps the memory for reading only."""
        memory = mmap.mmap(handle, layout.size, prot=mmap.PROT_READ)
        return cls(np.frombuffer(memory, dtype=np.float64).reshape(layout.ranks, layout.slot), layout)

    def heads(self) -> Floats:
        """[ranks, HEADER] a copy of the heartbeats."""
        return self.numbers[:, :HEADER].copy()

    def totals(self, first: int, count: int) -> Floats | None:
        """[ranks, count, COLUMNS] totals at the ends of steps first, first + 1, ...; None if some are overwritten.

        Totals before the first step are 0. The caller must have checked that all ranks have published these steps.
        """
        rings = self.numbers[:, HEADER:].reshape(self.layout.ranks, self.layout.rows, ROW)
        steps = np.arange(first, first + count)
        rows = rings[:, steps % self.layout.rows, :COLUMNS].copy()
        rows[:, steps < 0] = 0
        oldest_kept = self.numbers[:, STEPS].max() - self.layout.rows + 1
        return rows if max(first, 0) >= oldest_kept else None
