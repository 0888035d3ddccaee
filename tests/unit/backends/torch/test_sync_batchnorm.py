"""BatchNorm that meets other ranks computes what torch's own does, on one rank and with what an update is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.backends.joint_statistics import JointStatistics
from hpctrain.backends.torch.task.checks import model_features
from hpctrain.backends.torch.task.sync_batchnorm import OverRanks, joint_names, wants_joint_statistics
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.config.combinations import refuse
from hpctrain.config.sections import Config, TrainConfig
from hpctrain.errors import UserError
from hpctrain.train.clock import IntervalClock
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
def test_every_kind_of_layer_computes_what_torch_does(name: str) -> None:
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
def test_images_volumes_and_half_precision(layer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
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
def test_checkpointed_layers_meet_again_in_the_backward_pass(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    values = torch.randn(5, 3, requires_grad=True)
    statistics = joint()
    with OverRanks(statistics):
        checkpoint(model, values, use_reentrant=reentrant).sum().backward()
    assert statistics.meetings == 3, "forward, forward again, backward"


def test_one_value_in_all_is_refused_but_for_a_trial() -> None:
    layer, value = nn.BatchNorm1d(2), torch.zeros(1, 2)
    with OverRanks(joint()), pytest.raises(UserError, match="one value per channel on all ranks"):
        layer(value)
    with OverRanks(joint(), fewest=1):
        assert layer(value).isfinite().all() and layer.running_var.isfinite().all()


def test_the_model_says_by_its_layers_what_it_wants() -> None:
    plain, own = nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.SyncBatchNorm(2))
    mixed = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    assert not wants_joint_statistics(plain, False) and wants_joint_statistics(plain, True)
    assert wants_joint_statistics(own, False) and wants_joint_statistics(mixed, True)
    assert not wants_joint_statistics(nn.Linear(1, 1), False)
    with pytest.raises(UserError, match="1 is a SyncBatchNorm, and other layers of the model are BatchNorm"):
        wants_joint_statistics(mixed, False)


def test_compiled_parts_are_refused() -> None:
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


def test_buffers_of_batchnorm_are_equal_on_all_ranks_by_all_their_names() -> None:
    layer = nn.BatchNorm1d(2)
    model = nn.Sequential(layer, nn.Sequential(layer), nn.InstanceNorm1d(2, track_running_stats=True))
    assert {name for name in joint_names(model) if "running_mean" in name} == {"0.running_mean", "1.0.running_mean"}


def test_an_export_is_that_of_plain_batchnorm() -> None:
    framework = make_framework(alone(), lambda: nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3)), sync_batchnorm=True)
    framework.step([{"x": np.ones((4, 12), np.float32), "y": np.zeros(4, np.int64)}], 4)
    plain = nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3))
    plain.load_state_dict(framework.model.state_dict())
    assert type(framework.model[1]) is nn.BatchNorm1d
    framework.close()
