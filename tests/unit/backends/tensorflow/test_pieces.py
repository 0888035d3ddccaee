"""Gradients of Keras models as pieces: which make which, and back; sums that all gradients reach as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.backends.tensorflow.keras_reducer import (
    CODECS,
    STACKED,
    HorovodReducer,
    HostReducer,
    KerasReducer,
    Pieces,
    grouped,
)
from hpctrain.reduce.flat_layout import LOSS, SLOTS, SQUARE, WEIGHT
from hpctrain.reduce.horovod_setup import Lease
from hpctrain.reduce.shm_allreduce import add_pairwise, sum_pairwise
from tests.support import codecs

SHAPES = [(4, 3), (3,), (200, 100), (4, 3), (), (3,), (4, 3)]


def variables(dtype: str = "float32") -> list[keras.Variable]:
    """Of these shapes, the first one of another type."""
    return [keras.Variable(np.zeros(shape), dtype="float32" if index else dtype) for index, shape in enumerate(SHAPES)]


def gradients() -> list[tf.Tensor]:
    """All numbers different."""
    return [
        tf.constant(np.random.default_rng(index).normal(size=shape), tf.float32) for index, shape in enumerate(SHAPES)
    ]


def test_small_gradients_of_one_shape_travel_together_and_large_ones_alone():
    assert grouped(SHAPES) == [(0, 3, 6), (1, 5), (2,), (4,)]
    assert grouped([(STACKED,), (STACKED,), (STACKED - 1,), (STACKED - 1,)]) == [(0,), (1,), (2, 3)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_packed_is_unpacked(dtype):
    pieces = Pieces(variables(dtype))
    packed = pieces.pack_with(gradients(), {LOSS: 2.5, WEIGHT: 7})
    assert [piece.dtype.name for piece in packed] == [dtype] * 5
    assert [tuple(piece.shape) for piece in packed] == [*pieces.shapes, (SLOTS,)]
    assert [tuple(piece.shape) for piece in pieces.zeros()] == [*pieces.shapes, (SLOTS,)]
    assert (packed[-1][LOSS], packed[-1][WEIGHT], packed[-1][SQUARE]) == (2.5, 7, 0)
    for got, wanted in zip(pieces.unpack(packed), gradients(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_one_rank_sums_nothing_and_knows_the_norm():
    pieces = Pieces(variables())
    sums = KerasReducer().sum(pieces.pack_with(gradients(), {LOSS: 1.0}))
    square = sum(float(np.square(gradient).sum(dtype=np.float64)) for gradient in gradients())
    assert float(sums[-1][SQUARE]) == pytest.approx(square, rel=1e-5)
    assert float(sums[-1][LOSS]) == 1.0


class Doubled:
    """As two ranks of equal gradients would be summed, into memory that the next call overwrites."""

    dtype = np.dtype(np.float32)

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.kept: list[NDArray[Any]] = []

    def sum(self, *pieces: NDArray[Any]) -> list[NDArray[Any]]:
        """See PieceAllreduce."""
        self.seen.append(len(pieces))
        self.kept = self.kept or [np.empty_like(piece) for piece in pieces]
        for kept, piece in zip(self.kept, pieces, strict=True):
            np.multiply(piece, 2, out=kept)
        return self.kept

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("joined", [False, True])
def test_sums_are_ones_own_and_a_gpus_gradients_are_copied_as_one(joined):
    pieces, host = Pieces(variables()), Doubled()
    reducer = HostReducer("mpi-flat", host, joined)
    summed = tf.function(
        lambda factor: reducer.sum(pieces.pack_with([factor * one for one in gradients()], {LOSS: factor}))
    )
    first, second = summed(tf.constant(1.0)), summed(tf.constant(10.0))
    assert host.seen == [2 if joined else 5] * 2
    for factor, found in ((1, first), (10, second)):
        assert float(found[-1][LOSS]) == 2 * factor
        for got, one in zip(pieces.unpack(found), gradients(), strict=True):
            np.testing.assert_allclose(got, 2 * factor * one, rtol=1e-6)


@pytest.mark.parametrize("count", range(2, 9))
def test_terms_are_added_pairwise_and_one_of_them_is_kept(count):
    for kept in range(count):
        terms = [np.random.default_rng((count, rank)).normal(size=5) for rank in range(count)]
        wanted, own, out, same = np.sum(terms, axis=0), terms[kept].copy(), np.empty(5), np.empty(5)
        sum_pairwise(terms, same)
        add_pairwise(terms, out, kept)
        np.testing.assert_array_equal(same, out, "whoever adds up, and leaves all of them as they are")
        np.testing.assert_allclose(out, wanted, rtol=1e-12)
        np.testing.assert_array_equal(terms[kept], own)


@pytest.mark.parametrize(
    ("cuts", "compress", "lengths"),
    [
        (False, False, [4_507_216]),
        (True, False, [7_216, 300_000, 4_194_304, 5_696]),
        (True, True, [307_200, 4_200_000, 16]),
    ],
)
def test_small_gradients_share_one_message_and_very_large_ones_are_cut(cuts, compress, lengths):
    sent: dict[str, int] = {}

    def grouped_allreduce(values, op, name):
        assert name not in sent
        sent[name] = int(tf.size(values[0]))
        return [2 * value for value in values]

    module: Any = SimpleNamespace(Sum=object(), grouped_allreduce=grouped_allreduce)
    reducer = HorovodReducer("horovod-flat", Lease(module, 0, cuts), compress)
    shapes = [(500, 600), (2100, 2000), (70, 100), (7, 20), (4, 15), (SLOTS,)]
    pieces = [tf.reshape(tf.range(np.prod(shape), dtype=tf.float32) % 1024, shape) for shape in shapes]
    sums = reducer.sum(pieces)
    assert sorted(sent.values()) == sorted(lengths)
    for total, piece in zip(sums[:-1], pieces[:-1], strict=True):
        assert np.array_equal(total, 2 * piece), "powers of two and small numbers are exact in 16 bits too"
    assert np.array_equal(np.delete(sums[-1], SQUARE), np.delete(2 * pieces[-1], SQUARE))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_values_are_sent_rounded_as_numpy_rounds(name):
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32)
    values, found = bits.view(np.float32), []
    for codec in (CODECS[name], codecs.CODECS[name]):
        packed, back = np.zeros(len(values), np.uint16), np.zeros(len(values), np.float32)
        codec.encode(values, packed)
        codec.decode(packed, back)
        found.append(back)
    np.testing.assert_array_equal(*found)
