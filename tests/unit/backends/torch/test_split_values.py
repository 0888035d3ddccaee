"""Random numbers of a tensor group: equal on all ranks for values that all have, different ones for parts of values,
and the same again when they are recomputed."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.overrides import get_overridable_functions
from torch.utils.checkpoint import checkpoint

from hpctrain import columns, rows
from hpctrain.backends.torch.strategies.sequence import blocks_of, compute_in_rows
from hpctrain.backends.torch.strategies.split_values import DRAWS, of_rank
from hpctrain.backends.torch.strategies.tensor import cut_model, layers_to_cut, named_layers
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.comm.group import Group


class OneOf(Group):
    """A rank of several; the others are never asked."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("some")
        self.rank, self.size = rank, size


@torch.library.custom_op("tests::speckled", mutates_args=())
def speckled(values: Tensor) -> Tensor:
    """Stands for the attention of an extension, which has a dropout of its own."""
    return values * torch.rand(values.shape)


def drawn(rank: int, model: nn.Module) -> dict[str, Tensor]:
    """What a rank draws after it has computed its part of a layer's outputs."""
    cut_model(model, layers_to_cut(model, {"up": columns}, 2), TPGroup(OneOf(rank, 2)), Group("data"), [])
    torch.manual_seed(5)
    values = torch.ones(4, 8)
    part = model.up(values)
    return {
        "whole": dropout(values, 0.5),
        "noise of whole": torch.randn_like(values),
        "plain": torch.rand(3),
        "part": dropout(part, 0.5) == 0,
        "noise of part": torch.randn_like(part),
        "in place": part.clone().bernoulli_(0.5),
        "operator of an extension": speckled(part),
        "random in evaluation": torch.rand_like(model.eval().up(values)),
        "next": torch.rand(3),
    }


def test_ranks_draw_different_numbers_for_parts_only():
    first, second = (drawn(rank, nn.ModuleDict({"up": nn.Linear(8, 8), "drop": nn.Dropout()})) for rank in range(2))
    differ = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert differ == {"part", "noise of part", "in place", "operator of an extension"}


def test_copies_of_parts_are_plain():
    part = torch.ones(3).as_subclass(of_rank(1))
    torch.save(part, saved := io.BytesIO())
    saved.seek(0)
    for found in (copy.deepcopy([part])[0], torch.load(saved)):
        assert type(found) is Tensor and torch.equal(found, torch.ones(3))


class Steps(nn.Module):
    """A block with dropout everywhere, some of whose steps a checkpoint of torch computes again."""

    again = (0, 0)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        steps = [self.drop, self.norm, self.drop, self.up, self.drop, self.down, self.drop]
        begin, end = self.again
        values = nn.Sequential(*steps[:begin])(x)
        values = checkpoint(nn.Sequential(*steps[begin:end]), values, use_reentrant=False)
        return x + nn.Sequential(*steps[end:])(values)


@pytest.mark.parametrize("in_rows", [False, True])
def test_a_checkpoint_may_begin_and_end_anywhere(in_rows):
    torch.manual_seed(1)
    blocks = [Steps(), Steps()]
    model, tp_group = nn.Sequential(*blocks), TPGroup(Group("tensor"))
    layers = named_layers(model, {"*.up": columns, "*.down": rows})
    cut_model(model, layers, tp_group, Group("data"), [])
    if in_rows:
        compute_in_rows(blocks_of(model, layers), tp_group)
    values, found = torch.randn(3, 8), {}
    for again in itertools.combinations_with_replacement(range(8), 2):
        for block in blocks:
            block.again = again
        torch.manual_seed(5)
        model(values).sum().backward()
        found[again] = torch.cat([one.grad.flatten() for one in model.parameters()])
        model.zero_grad()
    assert [again for again, gradients in found.items() if not torch.equal(gradients, found[0, 0])] == []


def test_random_functions_are_known():
    def is_seeded(name):
        operation = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
        overloads = [] if operation is None else [getattr(operation, one) for one in operation.overloads()]
        return any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)

    names = {one.__name__ for functions in get_overridable_functions().values() for one in functions}
    whole_layers = {"miopen_rnn", "lstm", "gru", "rnn_tanh", "rnn_relu"}
    assert {name for name in names if is_seeded(name)} - whole_layers <= DRAWS
