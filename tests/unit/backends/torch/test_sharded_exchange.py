"""Ranks that share memory wait for each other before they read what others write; threads stand for ranks."""

from __future__ import annotations

import mmap
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hpctrain.backends.torch.reduce.sharded_exchange import SEND, ShmSharded
from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.reduce.flat_layout import LOSS, SLOTS, SQUARE
from hpctrain.reduce.shm_allreduce import ADD, ARRIVE, SharedArrays

LENGTH = 10
RANGES = (slice(0, 4), slice(4, LENGTH))
PATIENCE_S = 120.0


class Late(Group):
    """Of two ranks the second one does nothing until the first has come to the next meeting, or past it."""

    def __init__(self, rank: int, both: threading.Barrier, first_at: dict[str, threading.Event]) -> None:
        super().__init__("threads")
        self.rank, self.size = rank, 2
        self.both, self.first_at = both, first_at

    def wait_for_first(self, what: str) -> None:
        """Returns at once on the first rank."""
        if self.rank:
            assert self.first_at[what].wait(PATIENCE_S)

    def meet(self, what: str, timeout_s: float = TIMEOUT_S) -> None:
        if self.rank == 0:
            self.first_at[what].set()
        self.both.wait(PATIENCE_S)
        if what == ARRIVE:
            self.wait_for_first(ADD)

    def past(self, *whats: str) -> None:
        """Nobody waits for the first rank at these meetings any more."""
        if self.rank == 0:
            for what in whats:
                self.first_at[what].set()


def ranks(work: Callable[[ShmSharded, Late], None]) -> None:
    """Calls it on two ranks at the same time."""
    barrier = threading.Barrier(2)
    first_at: dict[str, threading.Event] = defaultdict(threading.Event)
    for what in (ARRIVE, ADD, SEND):
        first_at[what].clear()
    memory = np.zeros((2, LENGTH + SLOTS + 1))

    def one(rank: int) -> None:
        node = Late(rank, barrier, first_at)
        shared = SharedArrays(node, None, mmap.mmap(-1, 1), tuple(memory))
        try:
            work(ShmSharded(shared, LENGTH + SLOTS, LENGTH, RANGES), node)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def test_nobody_reads_what_a_late_rank_has_yet_to_write():
    """Gradients, losses, norms and parameters."""
    values = np.random.default_rng(1).normal(size=(2, LENGTH + SLOTS))
    total = values.sum(0)

    def work(exchange, node):
        mine, other = RANGES[node.rank], RANGES[1 - node.rank]
        node.wait_for_first(ARRIVE)
        exchange.buffer[:] = values[node.rank]
        exchange.scatter(needs_norm=True)
        node.past(ARRIVE, ADD)
        np.testing.assert_allclose(exchange.buffer[mine], total[mine], rtol=1e-15)
        np.testing.assert_allclose(exchange.slots[LOSS], total[LENGTH + LOSS], rtol=1e-15)
        np.testing.assert_allclose(exchange.slots[SQUARE], np.square(total[:LENGTH]).sum(), rtol=1e-14)
        node.wait_for_first(SEND)
        for leaving in exchange.leaving:
            leaving[mine] = 7.0 + node.rank
        exchange.gather()
        node.past(SEND)
        np.testing.assert_array_equal(exchange.buffer[other], 8.0 - node.rank)

    ranks(work)
