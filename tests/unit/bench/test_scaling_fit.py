"""Fits of the scaling benchmark, on measurements made up from known constants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.bench.scaling.fit import ExchangeModel, Link, Sample, Shape, fit_amdahl, fit_exchange, least_squares, ring

SIZES = (2**12, 2**16, 2**20, 2**24)


def exchanges(model: ExchangeModel, shapes: list[Shape], noise: float = 0.0, seed: int = 0) -> list[Sample]:
    """Three rounds of what such links would show."""
    random = np.random.default_rng(seed)
    return [
        Sample(shape, size, model.seconds(shape, size) * (1 + noise * random.standard_normal()))
        for _ in range(3)
        for shape in shapes
        for size in SIZES
    ]


@given(alpha=st.floats(1e-6, 1e-3), gb_per_s=st.floats(0.02, 20))
@settings(deadline=None, max_examples=30)
def test_two_hosts_give_the_constants_of_the_link(alpha: float, gb_per_s: float) -> None:
    link = Link(alpha, 1e-9 / gb_per_s)
    fitted = fit_exchange(exchanges(ExchangeModel(between=link), [Shape(2, 1)]))
    assert fitted.inside is None and fitted.between is not None
    assert fitted.between.alpha_s == pytest.approx(alpha, rel=1e-3)
    assert fitted.between.s_per_byte == pytest.approx(link.s_per_byte, rel=1e-3)
    for nodes in (3, 4, 64):
        assert fitted.seconds(Shape(nodes, 1), 5e6) == pytest.approx(link.seconds(nodes, 5e6), rel=1e-3)


def test_links_inside_of_nodes_and_between_them_are_told_apart() -> None:
    true = ExchangeModel(Link(2e-6, 1e-10), Link(5e-5, 1e-9))
    shapes = [Shape(1, 2), Shape(1, 4), Shape(2, 4)]
    fitted = fit_exchange(exchanges(true, shapes, noise=0.02))
    for shape in (Shape(1, 8), Shape(3, 4), Shape(16, 4)):
        for size in SIZES:
            assert fitted.seconds(shape, size) == pytest.approx(true.seconds(shape, size), rel=0.1)


def test_one_disturbed_exchange_hardly_moves_the_fit() -> None:
    link = Link(3e-5, 1e-8)
    clean = exchanges(ExchangeModel(between=link), [Shape(2, 1)], noise=0.01)
    disturbed = [*clean[:-1], Sample(clean[-1].shape, clean[-1].bytes, 5 * clean[-1].seconds)]
    fitted = fit_exchange(disturbed).between
    assert fitted is not None
    assert fitted.s_per_byte == pytest.approx(link.s_per_byte, rel=0.03)


def test_no_constant_is_negative() -> None:
    # Falling times of growing messages: the best line would begin high and have a negative slope.
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    solution = least_squares(columns, np.array([3.0, 2.0, 1.0]))
    assert solution[1] == 0 and 1 <= solution[0] <= 3


def test_nothing_measured_tells_of_nothing() -> None:
    assert fit_exchange([]) == ExchangeModel(None, None)
    assert ExchangeModel().seconds(Shape(1, 1), 1e6) == 0


@given(parties=st.integers(1, 1000))
def test_a_ring_of_one_is_free_and_none_moves_a_buffer_more_than_twice(parties: int) -> None:
    messages, share = ring(parties)
    assert messages == 2 * (parties - 1)
    assert 0 <= share < 2 and (share == 0) == (parties == 1)


@given(serial=st.floats(0, 1), parallel=st.floats(0.01, 1))
@settings(deadline=None, max_examples=30)
def test_amdahls_law_is_found_again(serial: float, parallel: float) -> None:
    ranks = [1, 2, 4, 8]
    law = fit_amdahl(ranks, [serial + parallel / count for count in ranks])
    assert law.seconds(64) == pytest.approx(serial + parallel / 64, rel=1e-3, abs=1e-4)
    assert law.serial_fraction == pytest.approx(serial / (serial + parallel), abs=1e-3)
