"""One rank of a healthy run whose phases are recorded: ``python -m benchmarks.straggler.record FOLDER STEPS``.

Computation and exchange are real. Run it under mpirun, with no more ranks than idle cores.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.world import connect
from hpctrain.monitor import shared
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.monitor.shared import RingLayout, Slot, SlotReader
from hpctrain.monitor.window import WORK
from hpctrain.train.clock import Phase

SECONDS = {
    Phase.DATA: 0.001,
    Phase.FORWARD: 0.005,
    Phase.BACKWARD: 0.010,
    Phase.OPTIMIZER: 0.002,
    Phase.CALLBACKS: 0.001,
    Phase.CHECKPOINT: 0.001,
}
WARM_UP = 16


def main() -> None:
    """Records and saves ``rank-<r>.npy``: [STEPS, phases] seconds from the clock, including waiting."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    world = connect()
    layout = RingLayout(ranks=1, rows=steps + WARM_UP + 1)  # a reader skips the oldest row of a full ring
    handle, path = shared.create(layout)
    Path(path).unlink()
    clock = RingClock(Slot(shared.map_memory(handle, layout), layout, 0))
    clock.watch_gc()
    matrix = np.random.default_rng(0).standard_normal((96, 96)).astype(np.float32)
    products = products_per_second(matrix)
    gradient: NDArray[Any] = np.ones(100_000, dtype=np.float32)
    for _ in range(steps + WARM_UP):
        for phase in (Phase.DATA, Phase.TO_DEVICE, Phase.FORWARD, Phase.BACKWARD):
            multiply(matrix, int(SECONDS.get(phase, 0) * products))
            clock.mark(phase)
        gradient = world.data.sum(gradient, "exchange gradients") / np.float32(world.size)
        clock.left()
        for phase in (Phase.OPTIMIZER, Phase.CALLBACKS, Phase.CHECKPOINT):
            multiply(matrix, int(SECONDS[phase] * products))
            clock.mark(phase)
        clock.end_step(1.0)
    rows = SlotReader.of(handle, layout).totals(0, steps + WARM_UP)
    assert rows is not None
    np.save(folder / f"rank-{world.rank}.npy", np.diff(rows[0, :, :WORK], axis=0)[WARM_UP - 1 :])


def products_per_second(matrix: np.ndarray) -> float:
    """Matrix products per second on an idle core."""
    best = 0.0
    for _ in range(10):
        begin = time.perf_counter()
        multiply(matrix, 200)
        best = max(best, 200 / (time.perf_counter() - begin))
    return best


def multiply(matrix: np.ndarray, times: int) -> None:
    """Computes ``times`` products."""
    for _ in range(times):
        matrix @ matrix


if __name__ == "__main__":
    main()
