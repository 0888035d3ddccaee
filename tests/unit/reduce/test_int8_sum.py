"""Sums of one byte a value: what is rounded off is kept, all ranks hold the same bits, and bytes are counted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.reduce.int8_sum import BLOCK, Int8Sum, Residue, quantize
from tests.support.thread_groups import ThreadGroup

SLOTS = 16
Floats = NDArray[np.float32]


class Counting(ThreadGroup):
    """Counts the bytes that leave a rank."""

    bytes_sent = 0

    def swap(self, going: NDArray[Any], coming: NDArray[Any], what: str = "", timeout_s: float = 9.0) -> None:
        self.bytes_sent += going.nbytes // self.size * (self.size - 1)
        super().swap(going, coming, what, timeout_s)

    def gather(self, values: NDArray[Any], what: str, timeout_s: float = 9.0) -> NDArray[Any]:
        self.bytes_sent += values.nbytes * (self.size - 1) * (values.dtype == np.uint8 and values.ndim == 1)
        return super().gather(values, what, timeout_s)


class Ranks:
    """Int8 sums of several ranks that carry their errors from one sum to the next."""

    def __init__(self, size: int, values: int, exact: int = 0, feedback: bool = True) -> None:
        boards: list[Any] = [None] * size
        barrier = threading.Barrier(size)
        self.arrays = [np.zeros(values + SLOTS, np.float32) for _ in range(size)]
        self.residues = [Residue(exact, np.zeros(values, np.float32)) for _ in range(size)]
        self.groups = [Counting(rank, boards, barrier) for rank in range(size)]
        for residue in self.residues:
            residue.sharers[:] = size
        self.sums = [
            Int8Sum(group, array, values, residue)
            for group, array, residue in zip(self.groups, self.arrays, self.residues, strict=True)
        ]
        self.feedback = feedback

    def add(self, terms: list[Floats]) -> Floats:
        """The sum, the same on all ranks."""
        for array, term, residue in zip(self.arrays, terms, self.residues, strict=True):
            array[: len(term)], array[len(term) :] = term, 1.5
            residue.error *= self.feedback
        with ThreadPoolExecutor(len(self.sums)) as pool:
            list(pool.map(lambda one: one.run(), self.sums))
        assert len({array.tobytes() for array in self.arrays}) == 1, "all ranks hold the same bits"
        np.testing.assert_array_equal(self.arrays[0][len(terms[0]) :], np.float32(1.5 * len(terms)))
        return self.arrays[0][: len(terms[0])].copy()

    def error(self) -> Floats:
        """What the sums so far lack."""
        return np.sum([residue.error for residue in self.residues], axis=0)


def random_terms(size: int, values: int, seed: int) -> list[Floats]:
    """Of very different magnitudes."""
    random = np.random.default_rng(seed)
    found = random.normal(size=(size, values)) * 10.0 ** random.integers(-4, 1, (size, values))
    return list(found.astype(np.float32))


def packed(values: list[float]) -> tuple[NDArray[np.int8], Floats]:
    """One block."""
    block = np.zeros((1, BLOCK), np.float32)
    block[0, : len(values)] = values
    integers, scales = np.ones((1, BLOCK), np.int8), np.ones(1, np.float32)
    with np.errstate(invalid="ignore"):
        quantize(block, integers, scales, np.empty(BLOCK, np.float32))
    return integers, scales


def test_values_are_rounded_to_127_steps_ties_to_even() -> None:
    integers, scales = packed([127.0, -127.0, 0.5, 1.5, -2.5, 63.2])
    assert scales.tolist() == [1.0]
    assert integers[0, :7].tolist() == [127, -127, 0, 2, -2, 63, 0]


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-33])
def test_a_block_of_next_to_nothing_is_left_to_the_error(tiny: float) -> None:
    integers, scales = packed([tiny, -tiny])
    assert not (integers.astype(np.float32) * scales[:, None]).any()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(odd: float) -> None:
    integers, scales = packed([odd, 1.0])
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(integers.astype(np.float32) * scales[:, None]).any()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("values", [1, 1000, 70_001])
def test_what_sums_lack_is_what_the_ranks_carry(size: int, values: int) -> None:
    ranks = Ranks(size, values)
    wanted, found = np.zeros(values), np.zeros(values)
    for seed in range(5):
        terms = random_terms(size, values, seed)
        wanted += np.sum(terms, axis=0, dtype=np.float64)
        found += ranks.add(terms)
    np.testing.assert_allclose(found + ranks.error(), wanted, rtol=0, atol=1e-4)
    assert np.abs(found - wanted).max() > 1e-3 or values == 1, "so the error is not nothing"


def small_beside_large(feedback: bool) -> float:
    """The share of a small value that has arrived after 40 sums, next to a large one in the same block."""
    ranks = Ranks(2, 2, feedback=feedback)
    terms = [np.array([1.0, 1e-3], np.float32)] * 2
    return float(sum(ranks.add(terms)[1] for _ in range(40)) / (40 * 2e-3))


def test_error_feedback_lets_small_values_through() -> None:
    assert small_beside_large(feedback=True) == pytest.approx(1, abs=0.3)


def test_without_error_feedback_small_values_are_lost() -> None:
    assert small_beside_large(feedback=False) == 0


@pytest.mark.parametrize("size", [2, 4])
def test_a_quarter_of_the_bytes_of_a_ring_in_fp32(size: int) -> None:
    values = 100_000
    ranks = Ranks(size, values)
    ranks.add(random_terms(size, values, 0))
    ring = 2 * (size - 1) / size * 4 * values
    for group, one in zip(ranks.groups, ranks.sums, strict=True):
        assert group.bytes_sent == one.bytes_sent <= 0.27 * ring


def test_the_first_updates_are_exact() -> None:
    ranks = Ranks(2, 1000, exact=2)
    for seed in range(2):
        terms = random_terms(2, 1000, seed)
        np.testing.assert_array_equal(ranks.add(terms), terms[0] + terms[1])
        assert not ranks.error().any()
    ranks.add(terms)
    assert ranks.error().any()


@pytest.mark.parametrize(("old", "new", "nodes"), [(4, 2, 2), (2, 4, 4), (4, 4, 4), (4, 2, 1)])
def test_the_error_keeps_its_sum_on_other_ranks(old: int, new: int, nodes: int) -> None:
    """``nodes`` of the new ranks send each value; with one node nothing is compressed, and the error is forgotten."""
    saved = random_terms(old, 100, 0)
    sharers = np.full(2, old)
    total = np.zeros(100, np.float32)
    for rank in range(new):
        residue = Residue(0, np.ones(100, np.float32))
        residue.sharers[:] = new, nodes
        part = 100 // (new // nodes)
        residue.sent = (
            slice(rank % (new // nodes) * part, rank % (new // nodes) * part + part) if nodes > 1 else slice(0)
        )
        given = saved[rank] if old == new else np.mean(saved, axis=0, dtype=np.float64).astype(np.float32)
        residue.load(given, np.array([7]), sharers)
        assert residue.updates[0] == 7
        total += residue.error
    np.testing.assert_allclose(total, np.sum(saved, axis=0) * (nodes > 1), rtol=0, atol=1e-5)
