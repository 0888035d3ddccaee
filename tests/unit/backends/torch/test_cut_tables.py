"""A table whose rows are cut over ranks gives what the whole one gives, and each row that is needed travels once."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpctrain import vocabulary
from hpctrain.backends.torch.strategies.tensor import cut_model, layers_to_cut
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.comm.group import TIMEOUT_S, Group
from tests.support.thread_groups import in_threads

ROWS, WIDTH = 12, 3
PLACES: dict[str, Any] = {
    "repeated": [[3, 3, 11, 0], [3, 5, 11, 3]],
    "of one rank": [[0, 1, 1]],
    "of the last rank": [11, 11, 10],
    "all": list(range(ROWS)),
    "none": [],
}


def table() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, padding_idx=5).double())


def trained(model: nn.Sequential, places: Tensor) -> list[Tensor]:
    """Vectors, the gradient of a loss by the rows, and that of a loss that holds a gradient."""
    values = model(places)
    weights = torch.arange(values.numel(), dtype=torch.float64).reshape(values.shape).cos()
    (parameter,) = model.parameters()
    (slope,) = torch.autograd.grad((values.square() * weights).sum(), parameter, create_graph=True)
    if not places.numel():  # of which torch itself has no second derivative
        return [values.detach(), slope.detach(), slope.detach()]
    (second,) = torch.autograd.grad(slope.square().sum(), parameter)
    return [values.detach(), slope.detach(), second]


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("ranks", [2, 4])
def test_vectors_and_gradients_are_those_of_the_whole_table(ranks, places):
    indices = torch.tensor(places, dtype=torch.int64)
    whole_table = table()
    wanted = trained(whole_table, indices)

    def on_a_rank(group):
        own = copy.deepcopy(whole_table)
        cut = cut_model(own, layers_to_cut(own, {"0": vocabulary}, ranks), TPGroup(group), Group("data"), [])
        part = cut.slices["0.weight"]
        values, slope, second = trained(own, indices)
        assert torch.equal(values, wanted[0])
        for found, whole in ((slope, wanted[1]), (second, wanted[2])):
            torch.testing.assert_close(found, part.of(whole), rtol=0, atol=1e-12)
        return True

    assert all(in_threads(ranks, on_a_rank))
    if places:
        assert wanted[2].abs().max() > 1e-3


class Counted(Group):
    """The first of two ranks, which counts what it sends; the other one sends the same."""

    def __init__(self) -> None:
        super().__init__("counted")
        self.size, self.sent = 2, 0

    def gather(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> NDArray[Any]:
        self.sent += values.nbytes
        return np.stack([values] * 2)

    def add(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        self.sent += values.nbytes


def test_a_row_travels_once_and_gradients_do_not():
    group, model = Counted(), table()
    cut_model(model, layers_to_cut(model, {"0": vocabulary}, 2), TPGroup(group), Group("data"), [])
    model(torch.tensor([[0, 1, 6] * 50] * 10)).sum().backward()
    assert group.sent == 2 * WIDTH * 8, "two of the rows are this rank's"


@pytest.mark.parametrize("index", [-1, ROWS])
def test_indices_that_no_rank_has(index):
    model = table()
    cut_model(model, layers_to_cut(model, {"0": vocabulary}, 2), TPGroup(Counted()), Group("data"), [])
    with pytest.raises(IndexError, match="index out of range in 0"):
        model(torch.tensor([0, index]))
