"""Devices of any vendor: which one a rank gets, and GPUs that PyTorch cannot use. Devices are faked at the edge."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hpctrain
from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.device import gpu_for_nccl
from hpctrain.backends.torch.process_groups import OPEN, ProcessGroup, broadcast
from hpctrain.backends.torch.state.tensors import digest, fingerprint
from hpctrain.backends.torch.strategies.exchange import HostExchange
from hpctrain.backends.torch.strategies.pipeline.stage import Stage
from hpctrain.backends.torch.strategies.split_values import own_stream
from hpctrain.backends.torch.task import by_name, opening
from hpctrain.backends.torch.task.gradient_hooks import require_linear_hooks
from hpctrain.backends.torch.task.task_state import TaskState
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.config.sections import TrainConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.system import python
from hpctrain.system.gpus import Gpu
from hpctrain.train.clock import NO_CLOCK, Neighbours, Waiting
from hpctrain.train.stateful import value_of
from tests.support.thread_groups import Messages, ThreadGroup
from tests.tasks.torch_tasks import global_batches, make_framework, noisy_model
from tests.tasks.torch_tasks import train as train_steps

PACKAGE = Path(hpctrain.__file__).parent


def test_one_module_calls_the_api_of_devices():
    """Others ask it, so that a run is the same on AMD's and Intel's devices."""
    api = re.compile(
        r"(?<!backends\.)torch\.(cuda|xpu|accelerator|Event|Stream|get_device_module)\b|[\"'](cuda|xpu)[\"']"
    )
    names = {
        "backends/torch/process_groups.py": {'"cuda"', '"xpu"'},  # the names of backends by device
        "horovod_wheel/build.py": {'"cuda"'},  # a folder
    }
    found = {
        f"{path.relative_to(PACKAGE)}: {match[0]}"
        for path in PACKAGE.rglob("*.py")
        for match in api.finditer(path.read_text(encoding="utf-8"))
        if path != PACKAGE / "backends/torch/accelerator.py"
        and match[0] not in names.get(path.relative_to(PACKAGE).as_posix(), ())
    }
    assert not found


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Four devices of Intel; returns those that become current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(accelerator, "api", lambda device: SimpleNamespace(set_device=chosen.append))
    return chosen


def test_ranks_get_devices_in_turn(four):
    assert [accelerator.pick(rank) for rank in (0, 3, 5)] == four == [torch.device("xpu", n) for n in (0, 3, 1)]
    assert accelerator.vendor() == "Intel"


@pytest.mark.parametrize(
    ("given", "left"), [("MIG-a,MIG-b", ["MIG-a", "MIG-b", "MIG-a"]), ("MIG-a", ["MIG-a"] * 3), ("0,1", ["0,1"] * 3)]
)
def test_ranks_get_instances_of_gpus_in_turn(four, given, left, monkeypatch):
    """Of several, CUDA shows a process the first one only."""
    found = []
    for rank in range(3):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        accelerator.pick(rank)
        found.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert found == left


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """A PyTorch that finds no device; the GPUs that the kernel knows are added by tests."""
    gpus: list[Gpu] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(accelerator, "usable_gpus", lambda: gpus)
    for name in accelerator.HIDE.values():
        monkeypatch.delenv(name, raising=False)
    return gpus


@pytest.mark.parametrize("built", [None, "cuda"])
def test_a_machine_without_gpus_trains_on_cpus(without, built, monkeypatch):
    """Whether PyTorch is built for them or not: PyPI's is."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: built and torch.device(built))
    assert accelerator.pick(0) == torch.device("cpu")


@pytest.mark.parametrize(("cuda", "vendor"), [(None, ""), ("12.4", "NVIDIA")])
def test_pytorch_2_6_raises_if_there_is_none(without, cuda, vendor, monkeypatch):
    def none():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert (accelerator.pick(0), accelerator.vendor()) == (torch.device("cpu"), vendor)


ADDRESS = {"pci_domain_id": 9, "pci_bus_id": 1, "pci_device_id": 0}


def for_nccl(known: dict[str, Any], host: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Identity of a device of which PyTorch knows this."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    api = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**known))
    monkeypatch.setattr(accelerator, "api", lambda device: api)
    monkeypatch.setattr("hpctrain.backends.torch.device.socket.gethostname", lambda: host)
    return gpu_for_nccl(torch.device("xpu", 0))


@pytest.mark.parametrize("known", [{}, {"uuid": "0"}, {"uuid": "0", **ADDRESS}])
def test_devices_of_two_hosts_differ_whatever_pytorch_knows_of_them(known, monkeypatch):
    assert len({for_nccl(known, host, monkeypatch) for host in ("n1", "n2", "n2")}) == 2


def test_instances_of_one_gpu_are_one_device_for_nccl(monkeypatch):
    """It compares PCI addresses; these of a node with a domain for each GPU have the same bus."""
    every = [{"uuid": "MIG-1", **ADDRESS}, {"uuid": "MIG-2", **ADDRESS}, {"uuid": "3", **ADDRESS, "pci_domain_id": 25}]
    first, same, other = (for_nccl(known, "n1", monkeypatch) for known in every)
    assert first == same != other


def test_a_tensor_on_the_host_is_sent_by_way_of_the_device():
    """NCCL takes none from the host, where a module may keep a buffer."""
    sent: list[Any] = []

    def send(values, rank, what):
        return lambda: sent.append(values.device.type)

    peers: Any = SimpleNamespace(device=torch.device("meta"), broadcast=send)
    with pytest.raises(NotImplementedError, match="meta"):  # it has no values to bring back
        broadcast(SimpleNamespace(comm=1), [torch.ones(2)], "receive", peers)  # type: ignore[arg-type]
    assert sent == ["meta"]


@pytest.mark.parametrize("name", ["shutdown", "_shutdown", "other"])
def test_a_process_group_is_closed_whatever_pytorch_calls_that(name):
    """PyTorch 2.6 has the second name for NCCL, and none for gloo."""
    ended: list[str] = []
    group = Group("data")
    peers = OPEN[group] = ProcessGroup(
        group, SimpleNamespace(**{name: lambda: ended.append(name)}), torch.device("cpu")
    )
    peers.shared().close()
    assert ended == ([name] if "shutdown" in name else []) and group not in OPEN


def test_a_rank_that_fails_waits_for_no_other_on_its_gpu(monkeypatch):
    """NCCL closes a group together with the node's other ranks, which may wait for this one in a collective."""
    ended: list[str] = []
    monkeypatch.setattr(accelerator, "synchronize", lambda device: ended.append("synchronize"))
    monkeypatch.setattr(python, "AT_ONCE", threading.Event())
    calls = {name: functools.partial(ended.append, name) for name in ("abort", "shutdown")}
    ranks, group = SimpleNamespace(**calls), Group("data")

    def use(error: Exception | None) -> None:
        OPEN[group] = ProcessGroup(group, ranks, torch.device("cuda", 0))
        with contextlib.suppress(ValueError, RunFailed), closing(OPEN[group].shared()) as peers, peers.explained("add"):
            if error is not None:
                raise error

    use(ValueError("of the task"))
    use(RuntimeError("NCCL error"))
    assert ended == [] and group not in OPEN and python.AT_ONCE.is_set()
    use(None)
    assert ended == ["synchronize", "shutdown"]


def test_gpus_that_pytorch_cannot_use_are_an_error_unless_they_are_hidden(without, monkeypatch):
    without += [Gpu("AMD", Path("a")), Gpu("AMD", Path("b"))]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(UserError, match=r"has 2 GPUs of AMD, and PyTorch .* is built for CPUs") as error:
        accelerator.pick(0)
    assert error.value.fix.endswith("export ROCR_VISIBLE_DEVICES=")
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", hidden)
        assert accelerator.pick(0) == torch.device("cpu")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError):
        accelerator.pick(0)


def test_a_driver_that_is_too_old_is_told(without, monkeypatch):
    without.append(Gpu("NVIDIA", Path("nvidia0")))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.raises(UserError, match=r"has 1 GPU of NVIDIA, and PyTorch .* finds none") as error:
        accelerator.pick(0)
    assert "driver may be older" in error.value.fix


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex128]
)
def test_a_fingerprint_changes_with_any_bit_and_any_order(dtype, monkeypatch):
    monkeypatch.setattr("hpctrain.backends.torch.state.tensors.CHUNK", 4)  # several chunks
    values = (torch.arange(10) % 7).to(dtype)
    before = fingerprint(values)
    assert fingerprint(values.clone()) == before
    for place in range(10):
        other = values.clone()
        other.view(torch.uint8)[place * values.element_size()] ^= 1
        assert fingerprint(other) != before, place
    assert fingerprint(values.flip(0)) != before
    assert fingerprint(values.roll(4)) != before, "chunks in another order"


def test_a_fingerprint_is_of_the_values_and_not_of_their_place_in_memory():
    values = torch.randn(6, 4)
    assert fingerprint(values.t().contiguous().t()) == fingerprint(values)
    assert fingerprint(torch.zeros(0)) == 0
    assert digest([values]) == digest([values.clone()]) != digest([values + 1e-7])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_named_optimizers_update_in_one_pass(name):
    model = nn.Linear(3, 3)
    optimizer = by_name.make_optimizer(name, {"lr": 0.1}, model)
    assert optimizer is not None and optimizer.param_groups[0]["fused"]


def test_named_optimizers_of_sparse_or_valueless_parameters_do_not():
    for model in (nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2, device="meta")):
        optimizer = by_name.make_optimizer("sgd", {"lr": 0.1}, model)
        assert optimizer is not None and not optimizer.param_groups[0]["fused"]


@pytest.fixture
def kept() -> Any:
    """Restores torch's settings."""
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    cudnn.allow_tf32, cudnn.benchmark = before[1:]


def train(**keys: Any) -> TrainConfig:
    return TrainConfig(steps=1, global_batch=4, **keys)


def test_the_run_file_sets_how_kernels_compute_and_else_the_task_does(kept):
    cudnn = torch.backends.cudnn
    opening.set_kernels(train(matmul="tf32", cudnn_benchmark=True))
    assert torch.get_float32_matmul_precision() == "high" and cudnn.allow_tf32 and cudnn.benchmark
    opening.set_kernels(train())
    assert torch.get_float32_matmul_precision() == "high" and cudnn.benchmark
    opening.set_kernels(train(matmul="exact"))
    assert torch.get_float32_matmul_precision() == "highest" and not cudnn.allow_tf32


def test_a_run_in_fp32_hears_of_tensor_cores(kept, monkeypatch):
    gpu, model = torch.device("cuda", 0), nn.Linear(2, 2)
    monkeypatch.setattr(accelerator, "has_tf32", lambda device: device.type == "cuda")
    assert "tf32" in opening.advice_on(train(), model, gpu)[0]
    for keys in ({"matmul": "exact"}, {"matmul": "tf32"}, {"precision": "bf16"}):
        assert opening.advice_on(train(**keys), model, gpu) == []
    assert opening.advice_on(train(), model.double(), gpu) == []
    assert opening.advice_on(train(), nn.Linear(2, 2), torch.device("cpu")) == []
    torch.set_float32_matmul_precision("high")
    assert opening.advice_on(train(), nn.Linear(2, 2), gpu) == [], "the task has chosen"


def test_a_task_may_use_the_newer_setting_of_tf32(kept, monkeypatch):
    """PyTorch 2.9 and newer then refuse to say anything by the older one."""
    settings, gpu = torch.backends.cuda.matmul, torch.device("cuda", 0)
    if not hasattr(settings, "fp32_precision"):
        pytest.skip("this PyTorch has none")
    monkeypatch.setattr(accelerator, "has_tf32", lambda device: True)
    assert opening.advice_on(train(), nn.Linear(2, 2), gpu) == [opening.IN_FP32]
    settings.fp32_precision = "tf32"
    assert opening.advice_on(train(), nn.Linear(2, 2), gpu) == []


def test_an_error_of_page_locking_is_not_left_for_the_next_kernel(monkeypatch):
    said: list[str] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    api = SimpleNamespace(cudart=lambda: runtime, check_error=lambda code: said.append(f"error {code}"))
    monkeypatch.setattr(accelerator, "api", lambda device: api)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: said.append(f"kernel on {device}") or torch.ones(1))
    accelerator.pin(torch.ones(3), torch.device("cuda", 0))
    assert said == ["kernel on cuda:0", "error 2"]


def test_class_weights_and_modules_of_the_loss_follow_the_outputs():
    loss = by_name.as_loss(nn.CrossEntropyLoss(weight=torch.ones(3)), ("x", "y"))
    total, weight = loss(torch.zeros(4, 3, device="meta"), {"y": torch.zeros(4, dtype=torch.int64, device="meta")})
    assert total.is_meta and weight.is_meta
    model, loss = nn.Linear(2, 2), by_name.as_loss(nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)), ("x", "y"))
    found = TaskState(torch.optim.SGD(model.parameters()), {"loss": loss}, model).modules_of_functions()
    assert [type(one) for one in found] == [nn.BCEWithLogitsLoss]


def test_dropout_that_evaluation_mode_switches_off_is_told():
    def pretrained():
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()

    def said(model):
        return [line.split()[0] for line in opening.advice_on(train(), model, torch.device("cpu"))]

    assert said(nn.ModuleDict({"body": pretrained(), "teacher": pretrained().requires_grad_(False)})) == ["body"]
    assert said(pretrained()) == [], "the whole model is switched to training"
    assert said(nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Dropout())) == [], "frozen on purpose"


def test_out_of_memory_is_not_told_as_a_rank_that_is_late():
    peers = ProcessGroup(Group("data"), None, torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError), peers.explained("add up gradients"):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "keys", [{"clip_norm": 0.1, "ema_decay": 0.9}, {"precision": "fp16"}, {"sync_batchnorm": True}]
)
def test_a_task_may_set_the_default_device(keys):
    """What hpctrain keeps on the host stays there. Here it is the meta device, where no value can be read."""
    framework, batch = make_framework(alone(), noisy_model, **keys), next(global_batches(1))
    torch.set_default_device("meta")
    try:
        framework.dry_call(batch, [batch])
        losses = train_steps(framework, 2)
        framework.evaluate(batch)
        framework.load({tensor.name: value_of(tensor) for tensor in framework.state()})
        assert not framework.host.staging(3).any()
        nn.init.ones_(weights := nn.Parameter(torch.empty(2, device="cpu")))
        weights.register_hook(lambda gradient: gradient * 2)
        require_linear_hooks(nn.ParameterList([weights]))
        messages = HostExchange(
            Messages(ThreadGroup(0, [None], threading.Barrier(1))), Waiting(NO_CLOCK, Neighbours.PIPELINE)
        )
        stage = Stage(messages.group, torch.device("cpu"), exchange=messages)
        stage.send(torch.ones(2, device="cpu"), 0, 0)
        assert stage.receive(stage.begin_receive(0, 0, "")).value.sum() == 2
        with own_stream(1, torch.device("cpu")):
            pass
    finally:
        torch.set_default_device(None)
    assert losses == train_steps(make_framework(alone(), noisy_model, **keys), 2)
