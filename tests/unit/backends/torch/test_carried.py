"""State carried from batch to batch: what a model gets, and what becomes of it at another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hpctrain import CarriedState, PerRank  # noqa: E402 (after the skip)
from hpctrain.comm.world import alone  # noqa: E402
from hpctrain.errors import UserError  # noqa: E402
from tests.tasks.torch_tasks import make_framework  # noqa: E402


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_lanes_of_some_ranks_are_those_of_others(kind):
    network = getattr(torch.nn, kind)(3, 4, num_layers=2, batch_first=True)
    inputs = torch.randn(7, 5, 3)
    whole, old = CarriedState(), [CarriedState() for _ in range(3)]
    for carried, lanes in ((whole, inputs), *zip(old, inputs.tensor_split(3), strict=True)):
        assert carried.get(network) is None
        carried.keep(network, network(lanes)[1])
    everything = old[0].merge([one.state_dict() for one in old])
    for rank, lanes in enumerate(torch.randn(7, 5, 3).tensor_split(2)):
        part = CarriedState()
        part.load_state_dict(part.split(everything, rank, 2))
        begin = (0, 4)[rank]
        expected = first(whole.get(network))[:, begin : begin + len(lanes)]
        torch.testing.assert_close(first(part.get(network)), expected)
        assert not first(part.get(network)).requires_grad
        network(lanes, part.get(network))
    assert whole.split(whole.merge([CarriedState().state_dict()]), 0, 2) == {"hidden": None}


def first(hidden: Any) -> torch.Tensor:
    return hidden[0] if isinstance(hidden, tuple) else hidden


def test_evaluation_neither_reads_nor_changes_it_and_it_can_be_split():
    model, carried = torch.nn.Linear(1, 1), CarriedState()
    carried.keep(model, torch.ones(1, 2, 3))
    model.eval()
    carried.keep(model, torch.zeros(1, 2, 3))
    assert carried.get(model) is None
    assert carried.get(model.train()).sum() == 6
    PerRank(carried, on_other_ranks="split")


def test_it_is_each_ranks_own():
    with pytest.raises(UserError, match=r"state 'lanes' .* not in PerRank") as refused:
        make_framework(alone(), state={"lanes": CarriedState()})
    assert "PerRank(" in refused.value.fix
    make_framework(alone(), state={"lanes": PerRank(CarriedState(), on_other_ranks="split")}).close()
