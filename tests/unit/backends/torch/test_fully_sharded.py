"""Which layers are gathered one after the other, and which rows each rank has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.process_groups import word_of
from hpctrain.backends.torch.strategies.fsdp import fsdp_strategy
from hpctrain.backends.torch.strategies.fsdp.complete_sums import complete_gradients
from hpctrain.backends.torch.strategies.fsdp.fsdp_reducer import FullyShardedReducer
from hpctrain.backends.torch.strategies.fsdp.layers import layers_of
from hpctrain.backends.torch.strategies.fsdp.sharded_model import ShardGroups, shard_model
from hpctrain.backends.torch.strategies.partition import uncut
from hpctrain.backends.torch.strategies.row_shares import part_of_rows
from hpctrain.backends.torch.task.task_state import TaskState
from hpctrain.comm.group import Group
from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import UserError
from tests.tasks.tensor_tasks import Gpt


def names_of(model: nn.Module) -> list[str]:
    """Of the layers that are found."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in layers_of(model)]


class Model(nn.Module):
    """Named parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Block(nn.Module):
    """One that holds a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_layers_are_what_lists_and_sequences_are_made_of():
    assert names_of(Gpt()) == ["blocks.0", "blocks.1"]
    assert names_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2)))) == ["0", "2.0"]
    assert names_of(nn.Linear(2, 2)) == []


class Unlisted(nn.Module):
    """A block that holds no list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)


def test_blocks_beside_each_other_are_layers_too():
    assert names_of(Model(first=Unlisted(), second=Unlisted(), head=nn.Linear(2, 2))) == ["first", "second"]
    assert names_of(Model(encoder=Block(), decoder=Block())) == [
        f"{stack}.parts.{number}" for stack in ("encoder", "decoder") for number in (0, 1)
    ], "a stack is not a layer"


def test_a_block_is_gathered_as_a_whole():
    model = Model(stages=nn.ModuleList([nn.ModuleList([Block(), Block()])]), heads=nn.ModuleDict({"a": Block()}))
    assert names_of(model) == ["stages.0.0", "stages.0.1", "heads.a"]


def test_layers_are_those_of_named_classes():
    model = Model(first=Block(), other=Unlisted(), head=nn.Linear(2, 2))
    assert [type(layer) for layer in layers_of(model, ["Block", "Unlisted"])] == [Block, Unlisted]
    assert len(layers_of(model, ["Linear"])) == 5
    with pytest.raises(UserError, match="is of the class Blocks") as raised:
        layers_of(model, ["Block", "Blocks"])
    assert "Block, Linear, ModuleList, Unlisted" in raised.value.fix


class Experts(nn.ModuleList):
    """A list by another name."""


def test_what_cannot_be_called_is_no_layer():
    lists = nn.ModuleList([Experts([nn.Linear(2, 2), Block()]), nn.ParameterList([nn.Parameter(torch.ones(2))])])
    assert names_of(Model(lists=lists)) == ["lists.0.0", "lists.0.1"]


def test_a_pytorch_that_is_too_old_is_named(monkeypatch):
    for version, fits in [("2.9.1", False), ("2.11.0+cu130", True)]:
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        with nullcontext() if fits else pytest.raises(UserError, match=r"PyTorch 2\.11 or newer, and this is 2\.9\.1"):
            fsdp_strategy.require_torch()


class Unused:
    """A parameter of FSDP2 of which only what the end of a backward pass looks at is there."""

    def __init__(self, gradient: float | None, added: float | None = None, is_trained: bool = True) -> None:
        self.sharded_param = nn.Parameter(torch.ones(1), requires_grad=is_trained)
        self._unsharded_param = self.unsharded_param = nn.Parameter(torch.ones(2))
        self.unsharded_param.grad = None if gradient is None else torch.full((2,), gradient)
        self.unsharded_accumulated_grad = None if added is None else torch.full((2,), added)


def test_parameters_that_a_pass_has_not_used_get_zeros_before_they_are_summed():
    """As PyTorch 2.13 gives them by a setting."""
    every = [Unused(3.0), Unused(None), Unused(None, added=2.0), Unused(None, is_trained=False)]
    for sums in (False, True):
        seen: list[list[float] | None] = []

        def end(seen=seen):
            seen += [None if (slope := one.unsharded_param.grad) is None else slope.tolist() for one in every]

        complete_gradients(SimpleNamespace(reduce_grads=sums, fsdp_params=every), end)
        assert seen == [[3.0, 3.0], [0.0, 0.0] if sums else None, None, None]


def test_layers_that_share_a_parameter_are_left_to_the_model():
    one, other, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    assert names_of(Model(layers=nn.ModuleList([one, other, third]))) == ["layers.2"]
    tied = nn.Linear(2, 2)
    tied.weight = third.weight
    assert names_of(Model(layers=nn.ModuleList([one, third]), head=tied)) == ["layers.0"]
    assert names_of(Model(first=nn.Sequential(one, third), second=nn.Sequential(one))) == ["first.1"]


@given(st.integers(0, 50), st.integers(1, 9))
def test_rows_are_those_that_fsdp_shares_out(rows, ranks):
    ends = [part_of_rows(rows, rank, ranks) for rank in range(ranks)]
    chunks = torch.arange(rows).chunk(ranks) if rows else ()
    found = [list(range(begin, end)) for begin, end in ends]
    assert [each for each in found if each] == [chunk.tolist() for chunk in chunks]
    assert all(not each for each in found[len(chunks) :])


@pytest.mark.parametrize(("device", "word"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_the_device_says_what_moves_tensors(device, word):
    assert word_of(torch.device(device)) == word


@pytest.fixture
def one_rank() -> Iterator[ShardGroups]:
    """A process group of this process alone, which gathers and sums as several do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    alone = Group("data")
    yield ShardGroups(alone, alone, 0, 1, DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "shard"), [(nn.Linear(2, 2), "parameters"), (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), "gradients")]
)
def test_updates_use_the_weights_of_their_begin(model, shard, one_rank):
    """A hook may have called the model without a backward pass, and have changed the weights after that."""
    inputs = torch.ones(1, 2)
    partition = shard_model(model, uncut(), one_rank, Compute(torch.device("cpu")), ParallelConfig(shard=shard))
    ranks: Any = None  # it only closes them
    reducer = FullyShardedReducer("", partition, [], ranks)
    model(inputs)
    with torch.no_grad():
        for one in partition.every:
            one.own.zero_()
    reducer.begin()
    assert not model(inputs).any()


@pytest.mark.parametrize(("shard", "stays"), [("gradients", True), ("parameters", False)])
def test_layers_stay_whole_between_micro_batches(shard, stays, one_rank):
    """Of which all ranks have some of their own: they are gathered once per update."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ranks: Any = None  # it only closes them
    partition = shard_model(model, uncut(), one_rank, Compute(torch.device("cpu")), ParallelConfig(shard=shard))
    reducer = FullyShardedReducer("", partition, [], ranks)
    reducer.begin()
    for is_last, goes_on in ((False, True), (False, False), (True, False)):
        reducer.begin_pass(False)
        outputs = model(torch.ones(1, 2))
        reducer.begin_pass(is_last, goes_on)
        outputs.sum().backward()
        assert isinstance(model[0].weight, DTensor) != (stays and goes_on)


class Noisy(nn.Linear):
    """Draws from a generator that it holds."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.random = torch.Generator()


def test_what_layers_hold_is_saved_as_without_sharding(one_rank):
    """FSDP2 makes them objects of a class of PyTorch's."""
    model = nn.Sequential(Noisy(), Noisy())
    state = TaskState(torch.optim.SGD(model.parameters()), {}, model)
    before = [one.name for one in state.tensors([], 0)]
    shard_model(model, uncut(), one_rank, Compute(torch.device("cpu")), ParallelConfig(shard="parameters"))
    assert before and [one.name for one in state.tensors([], 0)] == before
