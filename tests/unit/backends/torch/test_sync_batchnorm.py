"""BatchNorm that meets other ranks computes what torch's own does, on one rank and with what an update is made of."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.backends.joint_statistics import JointStatistics
from hpctrain.backends.torch.task.checks import model_features
from hpctrain.backends.torch.task.sync_batchnorm import (
    OnDevice,
    OnGpus,
    OverRanks,
    joint_names,
    wants_joint_statistics,
)
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.config.combinations import refuse
from hpctrain.config.sections import Config, TrainConfig
from hpctrain.errors import UserError
from hpctrain.train.clock import IntervalClock
from tests.support.thread_groups import ThreadGroup, in_threads
from tests.tasks.torch_tasks import make_framework

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(6),
    "no statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "not affine": lambda: nn.BatchNorm1d(6, affine=False),
    "synchronised by torch": lambda: nn.SyncBatchNorm(6),
    "frozen": lambda: nn.BatchNorm1d(6).eval(),
    "lazy": nn.LazyBatchNorm1d,
}


def joint() -> JointStatistics:
    """Of one rank."""
    statistics = JointStatistics(Group("alone"), IntervalClock())
    statistics.begin_update(1)
    statistics.begin_micro_batch(0)
    return statistics


def passes(layer: nn.Module, values: Tensor, mode: Any = None) -> list[Tensor]:
    """Outputs, gradients and buffers after two passes."""
    values = values.clone().requires_grad_()
    for _ in range(2):
        if mode is None:
            outputs = layer(values)
            (outputs * torch.arange(outputs.numel()).view_as(outputs).to(outputs.dtype)).sum().backward()
        else:
            with mode:
                outputs = layer(values)
                (outputs * torch.arange(outputs.numel()).view_as(outputs).to(outputs.dtype)).sum().backward()
    assert values.grad is not None
    found = [outputs.detach(), values.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return [*found, *(buffer for buffer in layer.buffers())]


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_computes_what_torch_does(name):
    torch.manual_seed(1)
    values = torch.randn(5, 6, dtype=torch.float64) + 3
    own = LAYERS[name]().double()
    own(values)
    other = copy.deepcopy(own)
    before = joint()
    found, wanted = passes(other, values, OverRanks(before)), passes(own, values)
    assert before.meetings == (0 if name == "frozen" else 4)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("layer", "shape"), [(nn.BatchNorm2d, (4, 3, 5, 2)), (nn.BatchNorm3d, (2, 3, 2, 2, 3))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_volumes_and_half_precision(layer, shape, dtype):
    torch.manual_seed(1)
    values = torch.randn(shape).to(dtype)
    own = layer(3)
    found, wanted = passes(copy.deepcopy(own), values, OverRanks(joint())), passes(own, values)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for one, two in zip(found, wanted, strict=True):
        assert one.dtype == two.dtype
        scale = float(two.abs().max().clamp(min=1))
        torch.testing.assert_close(one / scale, two / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_meet_again_in_the_backward_pass(reentrant):
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    values = torch.randn(5, 3, requires_grad=True)
    statistics = joint()
    with OverRanks(statistics):
        checkpoint(model, values, use_reentrant=reentrant).sum().backward()
    assert statistics.meetings == 3, "forward, forward again, backward"


def test_one_value_in_all_is_refused_but_for_a_trial():
    layer, value = nn.BatchNorm1d(2), torch.zeros(1, 2)
    with OverRanks(joint()), pytest.raises(UserError, match="one value per channel on all ranks"):
        layer(value)
    with OverRanks(joint(), fewest=1):
        assert layer(value).isfinite().all() and layer.running_var.isfinite().all()


def test_the_model_says_by_its_layers_what_it_wants():
    plain, own = nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.SyncBatchNorm(2))
    mixed = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    assert not wants_joint_statistics(plain, False) and wants_joint_statistics(plain, True)
    assert wants_joint_statistics(own, False) and wants_joint_statistics(mixed, True)
    assert not wants_joint_statistics(nn.Linear(1, 1), False)
    with pytest.raises(UserError, match="1 is a SyncBatchNorm, and other layers of the model are BatchNorm"):
        wants_joint_statistics(mixed, False)


def test_compiled_parts_are_refused():
    scripted = torch.jit.ScriptModule.__new__(torch.jit.ScriptModule)
    nn.Module.__init__(scripted)
    model = nn.Sequential(scripted)
    with pytest.raises(UserError, match="0 is compiled"):
        refuse(model_features(model, [], True, 2))
    in_place = nn.Sequential(nn.BatchNorm1d(2))
    in_place[0].compile(backend="eager")
    with pytest.raises(UserError, match="0 is compiled"):
        refuse(model_features(in_place, [], True, 2))
    with pytest.raises(UserError, match=r"train\.compile and train\.sync_batchnorm"):
        Config("run", "a:b", TrainConfig(steps=1, global_batch=1, compile=True, sync_batchnorm=True))


def test_buffers_of_batchnorm_are_equal_on_all_ranks_by_all_their_names():
    layer = nn.BatchNorm1d(2)
    model = nn.Sequential(layer, nn.Sequential(layer), nn.InstanceNorm1d(2, track_running_stats=True))
    assert {name for name in joint_names(model) if "running_mean" in name} == {"0.running_mean", "1.0.running_mean"}


def test_an_export_is_that_of_plain_batchnorm():
    framework = make_framework(alone(), lambda: nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3)), sync_batchnorm=True)
    framework.step([{"x": np.ones((4, 12), np.float32), "y": np.zeros(4, np.int64)}], 4)
    plain = nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3))
    plain.load_state_dict(framework.model.state_dict())
    assert type(framework.model[1]) is nn.BatchNorm1d
    framework.close()


def spread(channels: Tensor, like: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (like.ndim - 2))


def stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert values.numel(), "CUDA launches no kernel of no blocks"
    variance, mean = torch.var_mean(values, [0, *range(2, values.ndim)], correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    values: Tensor,
    means: Tensor,
    inverses: Tensor,
    mean: Any,
    variance: Any,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert mean is None or mean.dtype == variance.dtype == counts.dtype, "as CUDA demands"
    total, joint_mean, joint_variance = counts.new_zeros(()), torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for count, own, inverse in zip(counts, means, inverses, strict=True):  # as CUDA does, and no count may be 0
        share = count / (total + count)
        squares = (inverse**-2 - eps) * share + (own - joint_mean) ** 2 * share * (1 - share)
        joint_variance = joint_variance * (1 - share) + squares
        joint_mean, total = joint_mean * (1 - share) + own * share, total + count
    if mean is not None:
        mean.lerp_(joint_mean, momentum)
        variance.lerp_(joint_variance * counts.sum() / (counts.sum() - 1), momentum)
    return joint_mean, (joint_variance + eps).rsqrt()


def elemt(values: Tensor, weight: Any, bias: Any, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
    assert values.numel(), "CUDA launches no kernel of no blocks"
    found = (values - spread(mean, values)) * spread(inverse, values)
    return found if weight is None else found * spread(weight, values) + spread(bias, values)


def backward_reduce(slopes: Tensor, values: Tensor, mean: Tensor, inverse: Tensor, *_: Any) -> tuple[Tensor, ...]:
    assert values.numel(), "CUDA launches no kernel of no blocks"
    axes = [0, *range(2, values.ndim)]
    total, scaled = slopes.sum(axes), (slopes * (values - spread(mean, values))).sum(axes)
    return total, scaled, scaled * inverse, total


def backward_elemt(
    slopes: Tensor,
    values: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Any,
    total: Tensor,
    scaled: Tensor,
    counts: Any,
) -> Tensor:
    assert values.numel(), "CUDA launches no kernel of no blocks"
    count = counts.sum()
    centred = values - spread(mean, values)
    found = slopes - spread(total / count, values) - centred * spread(inverse**2 * scaled / count, values)
    return found * spread(inverse if weight is None else inverse * weight, values)


class Threads(OnDevice):
    """An exchange between threads, in place of GPUs."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(JointStatistics(Group("alone"), IntervalClock()), group, torch.device("cpu"))

    def among(self) -> Any:
        def gather(own: Tensor, what: str) -> Tensor:
            return torch.from_numpy(self.group.gather(own.detach().numpy(), what))

        def add(values: Tensor, what: str) -> Callable[[], None]:
            values.copy_(gather(values, what).sum(0))
            return lambda: None

        return SimpleNamespace(gather=gather, sum=add)


KERNELS = {
    "stats": stats, "gather_stats_with_counts": gather_stats, "elemt": elemt, "backward_reduce": backward_reduce,
    "backward_elemt": backward_elemt,
}  # fmt: skip
"""What PyTorch's kernels for GPUs compute, by formula."""


def called(name: str, kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a kernel with the arguments that PyTorch declares."""
    declared = getattr(torch.ops.aten, f"batch_norm_{name}").default._schema.arguments
    kinds = {"Tensor": Tensor, "Optional[Tensor]": (Tensor, type(None)), "float": float, "bool": bool}
    for argument, value in zip(declared, arguments, strict=True):
        assert isinstance(value, kinds[str(argument.type)]), f"{argument.name} of {name}"
    return kernel(*arguments)


@pytest.mark.parametrize("affine", [True, False])
def test_gpus_normalise_over_the_samples_of_all_ranks(affine, monkeypatch):
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(torch, f"batch_norm_{name}", functools.partial(called, name, kernel))
    torch.manual_seed(1)
    values = torch.randn(7, 3, 2, 2, dtype=torch.float64) + 2
    parts = [slice(0, 0), slice(0, 1), slice(1, 4), slice(4, 4), slice(4, 7)]
    whole = nn.BatchNorm2d(3, affine=affine).double()
    layers = [copy.deepcopy(whole) for _ in parts]
    wanted = passes(whole, values, contextlib.nullcontext())
    slopes = torch.arange(values.numel()).view_as(values).double()

    def one(group):
        layer, exchange, own = layers[group.rank], Threads(group), values[parts[group.rank]].clone().requires_grad_()
        for _ in range(2):
            weights = layer.weight, layer.bias, layer.running_mean, layer.running_var
            outputs = OnGpus.apply(own, *weights, layer.momentum, layer.eps, exchange)  # type: ignore[no-untyped-call]
            (outputs * slopes[parts[group.rank]]).sum().backward()
        return [outputs.detach(), own.grad, *(parameter.grad for parameter in layer.parameters())]

    found = in_threads(len(parts), one)
    for index, expected in enumerate(wanted[: 4 if affine else 2]):
        columns = [rank[index] for rank in found]
        joined = torch.cat(columns) if index < 2 else torch.stack(columns).sum(0)  # gradients are summed later
        torch.testing.assert_close(joined, expected, rtol=1e-10, atol=1e-10)
    halves = copy.deepcopy(layers[0]).bfloat16()
    in_threads(
        1,
        lambda group: OnGpus.apply(
            values, None, None, halves.running_mean, halves.running_var, 1.0, 0.0, Threads(group)
        ),
    )
    torch.testing.assert_close(halves.running_mean, values.mean((0, 2, 3)).bfloat16())
    for layer in layers:
        torch.testing.assert_close(layer.running_var, whole.running_var, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(layer.running_mean, whole.running_mean, rtol=1e-10, atol=1e-10)


def test_one_value_on_all_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "batch_norm_stats", stats)
    alone: Any = SimpleNamespace(gather=lambda own: own[None], add=lambda sums: None)
    with pytest.raises(UserError, match="one value per channel"):
        OnGpus.apply(torch.ones(1, 3), None, None, None, None, 0.1, 1e-5, alone)  # type: ignore[no-untyped-call]
