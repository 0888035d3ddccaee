"""Gradients that are summed from where autograd left them."""

from __future__ import annotations

import torch

from hpctrain.backends.torch.reduce.gradients import FlatGradients
from hpctrain.backends.torch.reduce.lent_gradients import LentGradients
from hpctrain.reduce.flat_layout import plan

SIZES = [40, 8, 33]
"""In the flat tensor: 33 at 0, padding, 8 at 48, padding, 40 at 64."""


def opened() -> tuple[LentGradients, torch.Tensor]:
    layout = plan(SIZES, None, 16)
    return LentGradients(layout, 20), torch.full((layout.length,), -1.0)


def lent(lender: LentGradients, flat: torch.Tensor, begin: int, size: int) -> torch.Tensor:
    gradient = torch.arange(float(size))
    assert lender.lend(begin, gradient, flat[begin : begin + size])
    return gradient


def test_a_message_within_a_gradient_is_sent_from_it() -> None:
    lender, flat = opened()
    gradient = lent(lender, flat, 64, 40)
    terms = lender.terms(80, flat[80:90])
    assert terms.data_ptr() == gradient[16:].data_ptr() and torch.equal(terms, gradient[16:26])
    assert torch.equal(flat, torch.full_like(flat, -1))  # nothing was copied


def test_a_message_over_several_gradients_is_copied_together() -> None:
    lender, flat = opened()
    first, last = lent(lender, flat, 0, 33), lent(lender, flat, 64, 40)
    message = flat[30:70]
    assert lender.terms(30, message) is message
    assert torch.equal(message[:3], first[30:]) and torch.equal(message[34:], last[:6])
    assert torch.equal(message[3:34], torch.full((31,), -1.0))
    assert lender.terms(34, flat[34:60]).data_ptr() == flat[34:].data_ptr()  # behind a large one


def test_a_rank_that_lends_nothing_does_not_sum_in_place_either() -> None:
    lender, flat = opened()
    terms = lender.terms(80, flat[80:90])
    assert terms.data_ptr() != flat[80:].data_ptr() and torch.equal(terms, flat[80:90])
    lent(lender, flat, 64, 40)
    lender.give_back()
    assert torch.equal(lender.terms(80, flat[80:90]), flat[80:90])


def test_what_does_not_fit_is_left() -> None:
    lender, flat = opened()
    assert not lender.lend(48, torch.zeros(8), flat[48:56])  # too small
    view = flat[64:104].view(8, 5)
    assert not lender.lend(64, torch.zeros(5, 8).t(), view)  # another memory order
    assert not lender.lend(64, torch.zeros(8, 5, dtype=torch.float64), view)


def test_a_gradient_that_grows_after_it_was_lent_is_sent_whole() -> None:
    """Reentrant checkpoints run several backward passes in one, and so may a loop without overlap."""
    layer = torch.nn.Linear(8, 5, bias=False)
    layout = plan([40], None, 16)
    flat = torch.full((layout.length,), -1.0)
    lender = LentGradients(layout, 20)
    gradients = FlatGradients([("weight", layer.weight)], flat, layout, lambda bucket: None, lent=lender)
    gradients.attach()
    for _ in range(2):
        gradients.begin()
        for factor in (1.0, 2.0, 3.0):
            (factor * layer(torch.ones(1, 8)).sum()).backward()
        torch.testing.assert_close(lender.terms(0, flat[:40]), torch.full((40,), 6.0))
