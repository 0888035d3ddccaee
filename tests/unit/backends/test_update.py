"""What an update does with summed gradients, for both frameworks alike."""

import math

import pytest

from hpctrain.backends.update import INITIAL, Decision, LossScale, NotFinite, UpdateResult, UpdateRule
from hpctrain.reduce.flat_layout import ExchangeResult

MEAN = ExchangeResult(loss=0.5, divisor=1.0)


def test_a_mean_loss_needs_no_factor_and_no_norm():
    rule = UpdateRule(clip_norm=None, loss_scale=None)
    assert not rule.needs_norm
    assert rule.decide(MEAN, None) == Decision(1.0, None)


def test_weights_and_the_loss_scale_divide():
    scale = LossScale()
    rule = UpdateRule(None, scale)
    assert (rule.needs_norm, rule.scale) == (True, INITIAL)
    assert rule.decide(ExchangeResult(0.5, 4.0), 8.0 * INITIAL) == Decision(1 / (4.0 * INITIAL), 2.0)
    assert scale.state[1] == 1, "it is told that the update was done"


@pytest.mark.parametrize(("norm", "factor"), [(8.0, 0.25), (2.0, 1.0), (1.0, 1.0)])
def test_clipping_looks_at_the_averaged_gradient(norm, factor):
    assert UpdateRule(2.0, None).decide(MEAN, norm) == Decision(factor, norm)
    assert UpdateRule(2.0, None).decide(ExchangeResult(0.5, 10.0), 10 * norm) == Decision(factor / 10, norm)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (0.5, math.inf), (math.inf, None)])
def test_what_is_not_finite_ends_the_run_unless_the_loss_scale_may_be_at_fault(loss, norm):
    with pytest.raises(NotFinite):
        UpdateRule(None, None).decide(ExchangeResult(loss, 1.0), norm)
    scale = LossScale()
    assert UpdateRule(None, scale).decide(ExchangeResult(loss, 1.0), norm) == Decision(None, None)
    assert scale.factor == INITIAL / 2
    with pytest.raises(NotFinite):
        for _ in range(100):
            UpdateRule(None, scale).decide(ExchangeResult(loss, 1.0), norm)


def test_a_norm_that_was_not_computed_is_not_reported():
    assert UpdateResult.of((3.0, 2.0), None, {}).sums() == {"loss": (3.0, 2.0)}
    assert UpdateResult.of((3.0, 2.0), 0.5, {}).sums() == {"loss": (3.0, 2.0), "grad_norm": (0.5, 1.0)}
