"""Names and copies of a torch model's and optimizer's state."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.backends.torch.device import gpu_for_nccl
from hpctrain.backends.torch.process_groups import each_has_a_gpu
from hpctrain.backends.torch.reduce.messages import unfit
from hpctrain.backends.torch.state.tensors import TorchTensor, digest
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.backends.update import GROWTH_STEPS, INITIAL, LossScale
from hpctrain.comm.group import Group
from hpctrain.comm.world import World, alone
from hpctrain.errors import UserError
from hpctrain.train.seeds import host_random_state, restore_host_random_state
from hpctrain.train.state import Placement
from tests.support.choices import Rehearsed
from tests.support.thread_groups import in_threads
from tests.tasks.torch_tasks import make_framework, noisy_model, plain_model, samples, sgd, train

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
}


def saved(framework: TorchFramework) -> dict[str, np.ndarray]:
    """Copies by name, read in two parts where there is more than a row."""
    arrays = {}
    for tensor in framework.state():
        dtype = "uint16" if tensor.dtype == "bfloat16" else tensor.dtype
        out = np.zeros(tensor.shape, dtype)
        if out.ndim and len(out) > 1:
            half, others = len(out) // 2, (0,) * (out.ndim - 1)
            tensor.copy_into(out[:half], (0, *others))
            tensor.copy_into(out[half:], (half, *others))
        else:
            tensor.copy_into(out)
        arrays[tensor.name] = out
    return arrays


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name):
    settings = {"model": noisy_model, "optimizer": OPTIMIZERS[name], "ema_decay": 0.9}
    first = make_framework(alone(), **settings)
    train(first, 3)
    arrays = saved(first)
    second = make_framework(alone(), **settings)
    train(second, 1)
    second.load(arrays)
    resumed = train(second, 3)
    first.load(arrays)  # random numbers come from one generator of the process
    assert train(first, 3) == resumed
    assert first.weights_hash() == second.weights_hash()
    again = saved(second)
    assert again.keys() == arrays.keys()
    assert all(again[key].dtype == arrays[key].dtype for key in arrays)


def test_names_are_in_a_fixed_order_and_say_what_is_whose():
    framework = make_framework(alone(), model=noisy_model, ema_decay=0.5)
    train(framework, 1)
    names = [tensor.name for tensor in framework.state()]
    assert names == [tensor.name for tensor in framework.state()]
    assert len(set(names)) == len(names)
    placement = {tensor.name: tensor.placement for tensor in framework.state()}
    assert placement["model/0.weight"] is Placement.REPLICATED
    assert placement["optimizer/momentum_buffer/0.weight"] is Placement.REPLICATED
    assert placement["ema/0.weight"] is Placement.REPLICATED
    assert placement["model/1.running_var"] is Placement.RANK
    assert placement["rng/python"] is Placement.RANK
    trained = {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}
    assert {tensor.name for tensor in framework.state() if tensor.is_trained} == {f"model/{name}" for name in trained}


def test_loading_says_what_is_wrong_and_changes_nothing():
    framework = make_framework(alone())
    before = framework.weights_hash()
    arrays = saved(framework)
    arrays["model/0.weight"] = arrays["model/0.weight"] + 1
    missing = {name: array for name, array in arrays.items() if name != "model/4.bias"}
    with pytest.raises(UserError, match=r"model/4.bias is missing"):
        framework.load(missing)
    with pytest.raises(UserError, match=r"model/4.bias has shape \[3\] here and \[2\]"):
        framework.load(arrays | {"model/4.bias": np.zeros(2, np.float32)})
    assert framework.weights_hash() == before
    framework.load(arrays)
    assert framework.weights_hash() != before


def test_a_rank_that_is_new_keeps_its_own_state():
    framework = make_framework(alone(), model=noisy_model)
    train(framework, 1)
    arrays = saved(framework)
    kept = {tensor.name for tensor in framework.state() if tensor.placement is Placement.REPLICATED}
    mean = framework.model[1].running_mean.clone()
    framework.load({name: arrays[name] for name in kept})
    assert torch.equal(framework.model[1].running_mean, mean)


def test_bfloat16_is_held_as_uint16():
    tensor = TorchTensor("model/x", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    out = np.zeros(2, np.uint16)
    tensor.copy_into(out)
    assert (tensor.dtype, out.tolist()) == ("bfloat16", [0x3FC0, 0xC000])
    tensor.assign(out[::-1])
    assert tensor.value.tolist() == [-2.0, 1.5]


def test_an_optimizer_that_cannot_be_saved_says_so():
    framework = make_framework(alone(), optimizer=OPTIMIZERS["sgd"])
    framework.optimizer.state[framework.source.averages.parameters[0]]["history"] = [1, 2]
    with pytest.raises(UserError, match="SGD keeps a list as 'history'"):
        framework.state()


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(UserError, match="not parameters of the task's model"):
        make_framework(alone(), optimizer=lambda model: torch.optim.SGD(plain_model().parameters(), lr=0.1))


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(UserError, match="LBFGS evaluates the loss several times"):
        make_framework(alone(), optimizer=lambda model: torch.optim.LBFGS(model.parameters()))


def test_a_lazy_layer_without_a_shape_is_refused_by_name():
    with pytest.raises(UserError, match=r"parameter 0\.weight has no shape yet"):
        make_framework(alone(), model=lambda: nn.Sequential(nn.LazyLinear(2)), optimizer=OPTIMIZERS["sgd"])


def test_python_and_numpy_draw_the_same_again():
    random.gauss(0, 1)
    np.random.standard_normal()
    state = host_random_state()
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]
    restore_host_random_state(state)
    assert [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()] == drawn


def test_streams_of_random_numbers_are_others_after_each_change_of_the_number_of_ranks():
    framework = make_framework(alone())
    drawn = []
    for step in (0, 0, 7, 8):
        framework.reseed(step)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
    assert all(len(set(of_one)) == 3 for of_one in zip(*drawn, strict=True))


def test_the_average_is_what_is_evaluated():
    framework = make_framework(alone(), ema_decay=0.9)
    train(framework, 5)
    batch = {"x": np.ones((4, 12), np.float32), "y": np.zeros(4, np.int64)}
    before = framework.weights_hash()
    averaged = framework.evaluate(batch)["loss"]
    assert framework.weights_hash() == before
    for parameter, average in zip(framework.source.averages.parameters, framework.source.averages.values, strict=True):
        parameter.data.copy_(average)
    framework.source.averages.values = []
    assert framework.evaluate(batch)["loss"] == averaged


def test_the_loss_scale_falls_at_once_and_rises_slowly():
    scale = LossScale()
    assert scale.overflowed()
    assert scale.factor == INITIAL / 2
    for _ in range(GROWTH_STEPS):
        scale.succeeded()
    assert scale.factor == INITIAL
    while scale.overflowed():
        pass
    assert scale.factor < 1e-3


def test_equal_weights_have_equal_hashes_in_any_memory_format():
    image = torch.randn(2, 3, 4, 5)
    assert digest([image]) == digest([image.to(memory_format=torch.channels_last)])
    assert digest([image]) != digest([image + 1])


def test_rehearsals_leave_the_batch_as_it_was():
    def scaled_in_place(model, batch):
        outputs: torch.Tensor = model(batch["x"].mul_(0.5))
        return outputs

    wanted = train(make_framework(alone(), forward=scaled_in_place), 1)
    assert train(make_framework(alone(), forward=scaled_in_place, choice=Rehearsed), 1) == wanted


def test_threads_are_those_of_the_run_file_also_where_no_supervisor_set_the_environment():
    before = torch.get_num_threads()
    try:
        make_framework(alone(), threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_averaging_leaves_no_graph_that_grows_from_step_to_step():
    framework = make_framework(alone(), ema_decay=0.9)
    train(framework, 2)
    averages = framework.source.averages.values
    assert averages and all(average.grad_fn is None for average in averages)


def test_no_memory_for_a_snapshot_is_told_as_such():
    with pytest.raises(MemoryError, match="snapshot of 1000000000000000000 bytes"):
        make_framework(alone()).host.staging(10**18)


def test_layers_that_a_task_keeps_in_evaluation_mode_stay_there_after_an_evaluation():
    framework = make_framework(alone(), model=noisy_model)
    norm = framework.model[1]
    norm.eval()
    train(framework, 1)
    framework.evaluate(samples())
    assert not framework.model.training
    train(framework, 1)
    assert framework.model.training and framework.model[3].training and not norm.training
    assert norm.num_batches_tracked == 0
    fresh = make_framework(alone(), model=lambda: noisy_model().eval())  # as pretrained models come
    train(fresh, 1)
    assert all(module.training for module in fresh.model.modules())


def test_a_loss_of_one_value_a_sample_is_a_clear_error():
    def each(outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["y"], reduction="none")

    with pytest.raises(UserError, match=r"the loss has shape \[30\]"):
        train(make_framework(alone(), loss=each), 1)


def test_a_half_precision_loss_is_summed_in_full_precision():
    def loss(outputs, batch):
        return (nn.functional.cross_entropy(outputs, batch["y"]) * 0 + outputs.sum() * 0 + 3000).half()

    batch = {name: array[:30] for name, array in samples().items()}
    result = make_framework(alone(), loss=loss).step([batch], 30)
    assert result.sums()["loss"] == (90000, 30)  # more than fp16 can hold


def test_channels_last_is_refused_by_name_where_there_are_volumes():
    with pytest.raises(UserError, match=r"0\.weight has 5 dimensions"):
        make_framework(alone(), model=lambda: nn.Sequential(nn.Conv3d(1, 1, 1)), optimizer=sgd, channels_last=True)
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 1, 1, 1, 2))
    with pytest.raises(UserError, match="mask has 5 dimensions"):
        make_framework(alone(), model=lambda: model, optimizer=sgd, channels_last=True)


class FakeHorovod:
    """What ``unfit`` asks of Horovod."""

    def __init__(self, cuda: bool, nccl: bool) -> None:
        self.cuda_built = lambda: cuda
        self.nccl_built = lambda: nccl
        self.rocm_built = lambda: False


class Pair(Group):
    """Two ranks that say the same."""

    def allgather(self, value: Any, what: str, timeout_s: float = 0.0) -> list[Any]:
        return [value, value]


@pytest.mark.parametrize(
    ("device", "cuda", "nccl", "found"),
    [
        ("cpu", False, False, None),
        ("cuda", False, False, "built for CPUs"),
        ("cuda", True, True, "share a GPU"),
        ("cuda", True, False, None),  # sums over MPI, which may share
    ],
)
def test_horovod_is_not_handed_what_it_cannot_sum(monkeypatch, device, cuda, nccl, found):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    error = unfit(FakeHorovod(cuda, nccl), Pair("data"), torch.device(device))
    assert (error is None) == (found is None)
    assert found is None or found in str(error)


def test_ranks_of_different_nccl_hosts_may_share_a_gpu(monkeypatch):
    """NCCL refuses two ranks of one host on one GPU only, and NCCL_HOSTID says what a host is."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    told = set()
    for host in ("one", "two", "two"):
        monkeypatch.setenv("NCCL_HOSTID", host)
        told.add(gpu_for_nccl(torch.device("cuda")))
    assert len(told) == 2


def test_all_ranks_learn_that_one_of_them_has_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))

    def work(group):
        device = torch.device("cpu" if group.rank else "cuda")
        return each_has_a_gpu(World(group, group, group, node=0, nodes=1, host="here"), device)

    assert in_threads(2, work) == [False, False]


class Mixed(torch.optim.Optimizer):
    """Second moments in a type of their own, a count and numbers that change their type in the group."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model.parameters(), {"lr": 0.05, "count": 0, "weight": 0, "last": None})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            group["weight"] += 0.3
            group["last"] = group["count"] / 2
            for parameter in group["params"]:
                slots = self.state[parameter]
                slots.setdefault("square", torch.zeros_like(parameter, dtype=self.dtype))
                slots.setdefault("seen", torch.zeros((), dtype=torch.int64))
                slots["square"].add_((parameter.grad**2).to(self.dtype))
                slots["seen"] += 1
                scale = group["lr"] / group["weight"]
                parameter.sub_(scale * parameter.grad / (slots["square"].float().sqrt() + 1e-3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_optimizer_state_keeps_its_own_types_and_counts(dtype):
    first, second = (make_framework(alone(), optimizer=lambda model: Mixed(model, dtype)) for _ in range(2))
    train(first, 3)
    arrays = saved(first)
    second.load(arrays)
    again = saved(second)
    assert again.keys() == arrays.keys()
    for name in (name for name in arrays if name.startswith("optimizer/")):
        assert again[name].dtype == arrays[name].dtype and np.array_equal(again[name], arrays[name]), name
    resumed = train(second, 3)
    first.load(arrays)
    assert train(first, 3) == resumed


class Centred(nn.Module):
    """Replaces its buffer in each forward pass."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_model()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean)


def test_rehearsals_put_back_buffers_that_forward_replaces():
    plain = make_framework(alone(), model=Centred)
    wanted = train(plain, 2)
    measured = make_framework(alone(), model=Centred, choice=Rehearsed)
    assert train(measured, 2) == wanted
    assert torch.equal(measured.model.mean, plain.model.mean)


def test_buffers_are_each_ranks_own():
    placement = {tensor.name: tensor.placement for tensor in make_framework(alone(), model=Centred).state()}
    assert placement["model/mean"] is Placement.RANK


def test_an_average_of_16_bit_weights_is_refused():
    with pytest.raises(UserError, match="16 bits"):
        make_framework(alone(), model=lambda: plain_model().bfloat16(), ema_decay=0.999)
