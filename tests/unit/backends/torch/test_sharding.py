"""What a rank's optimizer holds when its parameters are shared out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn, optim
from torch.nn import Parameter

from hpctrain.backends.torch.state.optimizer import OptimizerPart, OptimizerState, Slots
from hpctrain.backends.torch.strategies.fsdp.fsdp_strategy import uncuttable
from hpctrain.backends.torch.strategies.listed import STRATEGIES
from hpctrain.backends.torch.strategies.parameter_traits import OwnRows, ParameterTraits, replace_parameters, traits_of
from hpctrain.backends.torch.strategies.partition import Slices, uncut
from hpctrain.backends.torch.strategies.zero1 import OptimizerShards, ShardedReducer, has_rows, shard, shared_out
from hpctrain.backends.torch.task.shares import ONLY, Share
from hpctrain.comm.group import Group
from hpctrain.config.features import values_of
from hpctrain.train.state import Cut, Placement
from hpctrain.train.stateful import value_of


class Second(Group):
    """The second one of two ranks."""

    def __init__(self) -> None:
        super().__init__("data")
        self.rank, self.size = 1, 2


def halved(optimizer: optim.Optimizer, parameters: list[tuple[str, Parameter]]) -> OptimizerShards:
    """The optimizer, with what the second rank has of its parameters."""
    ids = {id(parameter) for _, parameter in parameters}
    sharded = shard(parameters, traits_of([OptimizerPart("", optimizer)]), Second())
    own = {id(sharded.pairs[rows.piece.parameter][1]): rows for rows in sharded.parts}
    mine = {one: own.get(one) for one in ids}
    for group in optimizer.param_groups:
        replace_parameters(optimizer, group, mine)
    return sharded


def test_groups_keep_their_settings_and_names_and_hold_views_of_the_rows():
    model = nn.Linear(3, 10)
    groups = [{"params": [("weight", model.weight)], "lr": 0.5}, {"params": [("bias", model.bias)]}]
    optimizer = optim.Adam(groups, lr=0.1)
    halved(optimizer, [("bias", model.bias), ("weight", model.weight)])  # the last comes first in the buffer
    weights, biases = optimizer.param_groups
    assert (weights["lr"], biases["lr"]) == (0.5, 0.1)
    assert weights["param_names"] == ["weight"] and biases["param_names"] == ["bias"]
    rows = weights["params"][0]
    assert rows.shape == (3, 3) and biases["params"][0].shape == (10,)
    with torch.no_grad():
        rows.fill_(7)
    assert model.weight[7:].eq(7).all() and not model.weight[:7].eq(7).any()


def of_rows(rows: OwnRows, name: str) -> Slices:
    """Where they lie."""
    return uncut().rows(name, {"weight": (4, 3), "bias": (4,)}[name], rows.piece.begin, rows.piece.end)


def test_state_from_the_start_is_cut_and_a_count_is_saved_by_who_has_the_first_row():
    weight, bias = Parameter(torch.zeros(4, 3)), Parameter(torch.zeros(4))
    optimizer = optim.Adagrad([weight, bias], lr=0.1)
    sums = torch.arange(12.0).view(4, 3)
    optimizer.state[weight]["sum"] = sums
    sharded = halved(optimizer, [("bias", bias), ("weight", weight)])
    names = {id(rows.parameter): sharded.pairs[rows.piece.parameter][0] for rows in sharded.parts}
    pieces = {id(rows.parameter): rows for rows in sharded.parts}
    slices = {one: of_rows(pieces[one], names[one]) for one in names}
    state = OptimizerState([OptimizerPart("", optimizer)], names, Slots(slices))
    found = {tensor.name: tensor for tensor in state.tensors()}
    assert set(found) == {"optimizer/sum/weight", "optimizer/sum/bias", "optimizer/step/bias"}
    assert all(tensor.placement is Placement.CUT for tensor in found.values())
    assert found["optimizer/sum/weight"].cut == Cut((4, 3), (3, 0))
    assert value_of(found["optimizer/sum/weight"]).tolist() == sums[3:].tolist()
    assert found["optimizer/step/bias"].cut == Cut((), ())


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (torch.zeros(4, 3), True),
        (torch.zeros(4, 3).t(), False),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(8, 6)[:, ::2], True),
        (torch.zeros(()), False),
        (torch.zeros(5), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(3, 0), False),
    ],
)
def test_rows_are_known_by_how_they_lie_in_the_buffer(tensor, rows):
    assert has_rows(tensor) == rows


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_a_parameter_without_elements_is_shared_out_too(shape):
    shapes = [shape, (4, 2), shape, (4, 2), shape]
    pairs = [(str(place), Parameter(torch.zeros(size))) for place, size in enumerate(shapes)]
    parts = [OptimizerPart("", optim.Adam([parameter for _, parameter in pairs]))]
    for traits in (traits_of(parts), ParameterTraits(updated=traits_of(parts).updated)):
        _, shares = shared_out(pairs, traits, 2)
        assert {one.parameter for one in shares.pieces} == {0, 1, 2, 3, 4}, "each has an owner"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_state_without_elements_is_saved_too(shape):
    empty = Parameter(torch.zeros(shape))
    optimizer = optim.Adam([empty])
    empty.grad = torch.zeros(shape)
    optimizer.step()
    slices = {id(empty): uncut().rows("empty", shape, 0, len(empty))}
    state = OptimizerState([OptimizerPart("", optimizer)], {id(empty): "empty"}, Slots(slices))
    saved = {one.name: value_of(one) for one in state.tensors()}
    optimizer.state.clear()
    state.load(saved)
    optimizer.step()
    assert optimizer.state[empty]["step"] == 2


def test_a_parameter_without_elements_is_refused_by_name_where_pytorch_shards():
    pairs = [("weight", Parameter(torch.zeros(4, 2))), ("empty", Parameter(torch.zeros(4, 0)))]
    parts = [OptimizerPart("", optim.AdamW([parameter for _, parameter in pairs]))]
    assert uncuttable({ONLY: Share(pairs)}, parts, traits_of(parts)) == "empty has no elements"


def test_each_value_of_shard_is_a_strategy_that_plan_can_estimate():
    estimated = [one.shard for one in STRATEGIES if one.estimate is not None]
    assert sorted(filter(None, estimated)) == sorted(values_of("parallel.shard").values())


def test_a_rank_may_update_nothing_or_everything():
    def ended(mine, theirs):
        reducer = SimpleNamespace(
            leaving=[[torch.zeros(2)] * len(mine)],
            mine=mine,
            theirs=theirs,
            arriving=[torch.ones(2)] * len(theirs),
            sums=SimpleNamespace(gather=lambda: None),
        )
        assert ShardedReducer.gather_parameters(cast(ShardedReducer, reducer))
        return theirs

    assert ended([torch.ones(2)], []) == []
    assert ended([], [torch.zeros(2)])[0].all()
