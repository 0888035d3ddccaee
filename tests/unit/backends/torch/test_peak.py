"""The estimate of a sharded model beside the peak of the tensors that exist in its updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.process_groups import DefaultGroup
from hpctrain.backends.torch.strategies.estimated import SavedForBackward
from hpctrain.backends.torch.strategies.fsdp.fsdp_memory import at_a_time, in_rows
from hpctrain.backends.torch.strategies.fsdp.fsdp_reducer import FullyShardedReducer
from hpctrain.backends.torch.strategies.fsdp.layers import layers_of
from hpctrain.backends.torch.strategies.fsdp.sharded_model import ShardGroups, shard_model
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate, footprints
from hpctrain.backends.torch.strategies.partition import uncut
from hpctrain.comm.imagined import Imagined
from hpctrain.config.sections import ParallelConfig
from tests.support.live_tensors import Live

WIDTH, DEPTH, SAMPLES = 192, 8, 160


class Deep(nn.Module):
    """Layers with a residual connection."""

    def __init__(self, layers: list[nn.Sequential]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(layer) for layer in layers])

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


class Residual(nn.Module):
    """A layer whose inputs are added to its outputs."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: Tensor) -> Tensor:
        return values + self.inner(values)  # type: ignore[no-any-return]


@pytest.fixture
def two_ranks() -> Iterator[ShardGroups]:
    """This process as the first of two, without the other."""
    data = Imagined("data", range(2))
    ranks = DefaultGroup(data, torch.device("cpu"))
    assert dist.group.WORLD is not None
    yield ShardGroups(data, data, 0, 1, DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    ranks.close()


@pytest.mark.parametrize(
    ("shard", "low", "passes"),
    [
        ("parameters", None, 1),
        ("gradients", None, 1),
        ("parameters", torch.bfloat16, 1),
        ("gradients", torch.bfloat16, 1),
        ("parameters", None, 2),
        ("gradients", None, 2),
    ],
)
def test_the_peak_is_within_a_tenth(shard, low, passes, two_ranks):
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH)]
    model = Deep(layers)
    inputs, compute = torch.ones(SAMPLES, WIDTH), Compute(torch.device("cpu"), low)
    kept = SavedForBackward(model.parameters())
    with kept.weighing(), compute.autocast():
        model(inputs).sum()
    total = sum(one.nbytes for one in model.parameters())
    whole = MemoryEstimate(total, total, 2 * total, 0, kept.num_bytes / SAMPLES, 0)
    keeps = shard == "gradients"
    sizes = at_a_time(list(model.parameters()), layers_of(model), compute, passes, keeps)
    (plan,) = footprints({1: in_rows(whole, 0.5, *sizes, passes > 1, keeps)}, 1, {1: SAMPLES}, 0)

    partition = shard_model(model, uncut(), two_ranks, compute, ParallelConfig(shard=shard))
    ranks: Any = None  # it only closes them
    reducer = FullyShardedReducer("", partition, [], ranks)
    optimizer = torch.optim.AdamW([one.own for one in partition.every])

    def update():
        reducer.begin()
        for number in range(passes):
            is_last = number == passes - 1
            reducer.begin_pass(is_last, goes_on=not is_last)
            with compute.autocast():
                loss = model(inputs).square().mean()
            loss.backward()
        reducer.exchange(loss.detach())
        optimizer.step()

    update()
    slots = (one for each in optimizer.state.values() for one in each.values() if isinstance(one, Tensor))
    with Live(iter([inputs, *slots, *(one.own for one in partition.every)])) as live:
        update()
    assert plan.total == pytest.approx(live.peak, rel=0.1)
