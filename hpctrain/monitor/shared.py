"""The memory that a node's ranks write and its agent reads: a heartbeat and a ring of rows for each rank.

Each rank writes its own slot and nothing else; the agent only reads, so neither waits for the other. All numbers are
float64. A reader takes rows up to the published count only, and checks afterwards that the ring has not caught up.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.monitor.window import COLUMNS
from hpctrain.system import processes, shared_memory

# Heartbeat: the first numbers of a slot.
PID, STARTED, STATE, STEPS, MARKED_AT, MARKED_PHASE, FIRST_STEP, DUMP_SIGNAL, DUMP_FILE, WAITS_FOR, LAYERS = range(11)
HEADER = 16
ROW = 16
assert COLUMNS <= ROW

JOINING, RUNNING, FINISHED = 0.0, 1.0, 2.0
"""Values of STATE."""
NO_PHASE = -1.0
"""Value of MARKED_PHASE at the beginning of a step."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a node's memory."""

    ranks: int
    """Ranks on the node."""
    rows: int
    """Steps that a ring holds."""

    @property
    def slot(self) -> int:
        """Numbers of one rank."""
        return HEADER + ROW * self.rows

    @property
    def size(self) -> int:
        """Bytes."""
        return 8 * self.slot * self.ranks


def create(layout: Layout) -> tuple[int, str]:
    """Makes the memory; its descriptor and path, which the caller unlinks. Raises OSError."""
    folder = shared_memory.FOLDER if os.access(shared_memory.FOLDER, os.W_OK) else None
    return shared_memory.create([(0, layout.size)], folder)


class Slot:
    """One rank's part, for writing."""

    def __init__(self, memory: mmap.mmap, layout: Layout, local_rank: int) -> None:
        self.rows = layout.rows
        begin = 8 * layout.slot * local_rank
        self.head = memoryview(memory)[begin : begin + 8 * HEADER].cast("d")
        self.ring = memoryview(memory)[begin + 8 * HEADER : begin + 8 * layout.slot]

    def join(self) -> None:
        """Says who this process is."""
        self.head[PID] = os.getpid()
        self.head[STARTED] = processes.birth(os.getpid())
        self.head[MARKED_PHASE] = NO_PHASE
        self.head[MARKED_AT] = time.monotonic()  # else the silence before the first mark is the host's uptime
        self.head[STATE] = RUNNING


def own_slot() -> Slot:
    """A slot in private memory, for a clock without a reader."""
    layout = Layout(ranks=1, rows=1)
    return Slot(mmap.mmap(-1, layout.size), layout, 0)


def map_memory(handle: int, layout: Layout) -> mmap.mmap:
    """Maps the memory into this process."""
    return mmap.mmap(handle, layout.size)


@dataclass(frozen=True)
class SlotReader:
    """All slots of a node, for reading."""

    numbers: NDArray[np.float64]
    """[ranks, numbers of a slot]"""
    layout: Layout

    @classmethod
    def of(cls, handle: int, layout: Layout) -> SlotReader:
        """Maps the memory for reading only."""
        memory = mmap.mmap(handle, layout.size, prot=mmap.PROT_READ)
        return cls(np.frombuffer(memory, dtype=np.float64).reshape(layout.ranks, layout.slot), layout)

    def heads(self) -> NDArray[np.float64]:
        """[ranks, HEADER] a copy of the heartbeats."""
        return self.numbers[:, :HEADER].copy()

    def totals(self, first: int, count: int) -> NDArray[np.float64] | None:
        """[ranks, count, COLUMNS] totals at the ends of steps first, first + 1, ...; None if they are overwritten.

        Before the first step they are 0. The caller has seen that all ranks have published these steps.
        """
        rings = self.numbers[:, HEADER:].reshape(self.layout.ranks, self.layout.rows, ROW)
        steps = np.arange(first, first + count)
        rows = rings[:, steps % self.layout.rows, :COLUMNS].copy()
        rows[:, steps < 0] = 0
        oldest_kept = self.numbers[:, STEPS].max() - self.layout.rows + 1
        return rows if max(first, 0) >= oldest_kept else None
