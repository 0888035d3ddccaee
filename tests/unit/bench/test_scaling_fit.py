"""Fits of the scaling benchmark, on measurements made up from known constants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.bench.scaling_model import (
    Amdahl,
    ExchangeModel,
    RingLink,
    Sample,
    Shape,
    fit_amdahl,
    fit_exchange,
    least_squares,
    ring,
)

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
    link = RingLink(alpha, 1e-9 / gb_per_s)
    fitted = fit_exchange(exchanges(ExchangeModel(between=link), [Shape(2, 1)]))
    assert fitted.inside is None and fitted.between is not None
    assert fitted.between.alpha_s == pytest.approx(alpha, rel=1e-3)
    assert fitted.between.s_per_byte == pytest.approx(link.s_per_byte, rel=1e-3)
    for nodes in (3, 4, 64):
        assert fitted.seconds(Shape(nodes, 1), 5e6) == pytest.approx(link.seconds(nodes, 5e6), rel=1e-3)


def test_links_inside_of_nodes_and_between_them_are_told_apart() -> None:
    true = ExchangeModel(RingLink(2e-6, 1e-10), RingLink(5e-5, 1e-9))
    shapes = [Shape(1, 2), Shape(1, 4), Shape(2, 4)]
    fitted = fit_exchange(exchanges(true, shapes, noise=0.02))
    for shape in (Shape(1, 8), Shape(3, 4), Shape(16, 4)):
        for size in SIZES:
            assert fitted.seconds(shape, size) == pytest.approx(true.seconds(shape, size), rel=0.1)


def test_one_disturbed_exchange_hardly_moves_the_fit() -> None:
    link = RingLink(3e-5, 1e-8)
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


def test_several_disturbed_exchanges_of_a_size_are_left_behind() -> None:
    """One in six is five times too slow: plain least squares would be off by more than a tenth."""
    link = RingLink(3e-5, 1e-8)
    samples = [
        sample for seed in range(4) for sample in exchanges(ExchangeModel(between=link), [Shape(2, 1)], 0.01, seed)
    ]
    disturbed = [
        Sample(each.shape, each.bytes, each.seconds * (5 if n % 6 == 0 else 1)) for n, each in enumerate(samples)
    ]
    fitted = fit_exchange(disturbed).between
    assert fitted is not None
    assert fitted.s_per_byte == pytest.approx(link.s_per_byte, rel=0.02)
    assert fitted.alpha_s == pytest.approx(link.alpha_s, rel=0.05)


def test_the_fit_weighs_outliers_as_huber_does() -> None:
    """One unknown: the solution is where the weighted residuals balance, each capped at 1.345 robust deviations."""
    values = np.array([0.98, 0.99, 1.0, 1.01, 1.02, 1.3])
    (found,) = least_squares(np.ones((6, 1)), values)
    misfit = found / values - 1
    spread = 1.4826 * np.median(np.abs(misfit))
    influence = np.clip(misfit, -1.345 * spread, 1.345 * spread) / values
    assert abs(influence.sum()) < 0.01 * np.abs(influence).sum()
    assert abs(found - values.mean()) > 0.02, "the mean of relative residuals is elsewhere"


def test_what_is_known_exactly_is_found_exactly() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 0.5], [1.0, 0.25]])
    assert least_squares(columns, columns @ [2.0, 0.0]) == pytest.approx([2.0, 0.0], abs=1e-12)
    assert least_squares(columns, columns @ [0.0, 3.0]) == pytest.approx([0.0, 3.0], abs=1e-12)
    assert least_squares(columns, columns @ [2.0, 3.0]) == pytest.approx([2.0, 3.0])


def test_two_ranks_on_one_node_tell_of_the_link_inside_and_one_rank_of_nothing() -> None:
    link = RingLink(2e-6, 1e-10)
    fitted = fit_exchange(exchanges(ExchangeModel(inside=link), [Shape(1, 2)]))
    assert fitted.inside is not None and fitted.between is None
    assert fitted.inside.alpha_s == pytest.approx(link.alpha_s) and fitted.inside.s_per_byte == pytest.approx(1e-10)
    assert fit_exchange([Sample(Shape(1, 1), 8, 1e-6)]) == ExchangeModel(None, None)


def test_nodes_that_take_less_than_their_insides_still_take_a_tenth() -> None:
    """Noise may make the whole look faster than a part; a link that costs nothing would predict nothing."""
    inside = [Sample(Shape(1, 2), size, 1e-3) for size in SIZES]
    both = [Sample(Shape(2, 2), size, 5e-4) for size in SIZES]
    between = fit_exchange([*inside, *both]).between
    assert between is not None
    assert between.seconds(2, SIZES[0]) == pytest.approx(5e-5, rel=0.05)


def test_a_ring_in_numbers() -> None:
    assert ring(1) == (0, 0) and ring(2) == (2, 1) and ring(4) == (6, 1.5)
    assert RingLink(0.5, 0.25).seconds(4, 8.0) == 6 * 0.5 + 1.5 * 8 * 0.25
    assert ExchangeModel(RingLink(0.5, 0), RingLink(0.25, 0)).seconds(Shape(2, 3), 1) == 4 * 0.5 + 2 * 0.25


def test_shapes_in_words() -> None:
    assert str(Shape(1, 1)) == "1 node (1 rank)" and str(Shape(2, 2)) == "2 nodes (4 ranks)"


def test_the_serial_share_of_no_time_at_all_is_none() -> None:
    assert Amdahl(0.0, 0.0).serial_fraction == 0
    assert Amdahl(1e-3, 3e-3).serial_fraction == pytest.approx(0.25)
    assert Amdahl(1.0, 4.0).seconds(4) == 2


@pytest.mark.parametrize(("count", "outlier"), [(20, 5.0), (40, 2.0), (50, 1.5)])
def test_measurements_that_are_all_alike_but_one_are_met(count: int, outlier: float) -> None:
    """As a coarse clock gives them: residuals of exactly zero leave no spread to weigh by."""
    (found,) = least_squares(np.ones((count + 1, 1)), np.array([1.0] * count + [outlier]))
    assert found == pytest.approx(1.0, rel=1e-6)
