"""Recomputed layers train as others do, bit for bit, and keep less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.backends.torch.task.recompute import PRODUCTS, draws, recompute
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from tests.tasks.torch_tasks import make_framework, train


class Block(nn.Module):
    """Dropout, running statistics and a power iteration: what a second pass could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.ones(6))

    def forward(self, values: Tensor) -> Tensor:
        changed = nn.functional.dropout(self.norm(self.narrow(values) * self.mask), 0.3, self.training)
        return values + nn.functional.gelu(changed)


class Net(nn.Module):
    """A stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(12, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.inward(inputs)
        for block in self.blocks:
            values = block(values)
        return self.out(values)  # type: ignore[no-any-return]


@pytest.mark.parametrize("patterns", [("blocks.*",), ("*",), ("blocks.1.norm", "blocks.2")])
@pytest.mark.parametrize("keys", [{}, {"precision": "bf16"}, {"sync_batchnorm": True}, {"recompute_keeps": "products"}])
def test_numbers_are_those_of_layers_that_keep_everything(patterns, keys):
    plain = make_framework(alone(), Net, **(keys | {"recompute_keeps": "inputs"}))
    expected = train(plain, 5, accumulate=2)
    recomputing = make_framework(alone(), Net, recompute=patterns, **keys)
    assert train(recomputing, 5, accumulate=2) == expected
    assert bits(recomputing) == bits(plain)


def bits(framework: TorchFramework) -> dict[str, bytes]:
    """Weights, buffers, optimizer and random state."""
    found = {}
    for tensor in framework.state():
        out = np.empty(tensor.shape, tensor.dtype)
        tensor.copy_into(out)
        found[tensor.name] = out.tobytes()
    return found


def kept_bytes(patterns: tuple[str, ...]) -> int:
    """What a forward pass keeps for the backward pass, weights aside."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU()) for _ in range(4)])
    stack = nn.Sequential(*(Whole(part) for part in model))
    recompute(stack, patterns)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape[0] == 512:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = stack(torch.randn(512, 8))
    assert outputs.requires_grad
    return sum(kept.values())


class Whole(nn.Module):
    """Layers as one."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, values: Tensor) -> Tensor:
        return self.layers(values)  # type: ignore[no-any-return]


def test_the_inputs_of_layers_are_all_that_is_kept():
    one = 512 * 8 * 4
    assert kept_bytes(("*",)) == 4 * one, "one for each of four layers"
    assert kept_bytes(()) >= 12 * one


class Products(TorchDispatchMode):
    """Counts matrix products with a bias, which backward passes do not contain."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kept", "times"), [((), 2), (PRODUCTS, 1)])
def test_kept_products_are_not_computed_again(kept, times):
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    whole = nn.Sequential(Whole(stack))
    recompute(whole, ["*"], kept)
    with Products() as counted:
        whole(torch.randn(16, 8)).sum().backward()
    assert counted.number == 8 * times


class Drops(nn.Module):
    """Draws by an operation that is kept, and then by one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, values: Tensor) -> Tensor:
        first = torch.native_dropout(self.linear(values), 0.5, True)[0]
        return functional.dropout(first * first, 0.5) * first


def test_kept_operations_that_draw_leave_later_random_numbers_as_they_are():
    found = []
    for kept in ((), (torch.ops.aten.native_dropout.default,)):
        torch.manual_seed(0)
        model = nn.Sequential(Drops())
        recompute(model, ["*"], kept)
        model(torch.randn(16, 8)).sum().backward()
        found.append([one.grad for one in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_attention_draws_only_with_dropout(share):
    for operation in (one for one in PRODUCTS if "attention" in one.name()):
        place = [one.name for one in operation._schema.arguments].index("dropout_p")
        assert draws(operation, (None,) * place + (share,), {}) == (share > 0)
        assert not draws(operation, (), {})
    assert not draws(torch.ops.aten.addmm.default, (), {})


def test_a_pattern_that_matches_nothing_is_refused_with_the_layers_there_are():
    with pytest.raises(UserError, match=r"no layer of the model is called block\.\*") as error:
        recompute(Net(), ["block.*"])
    assert "inward, blocks.0, blocks.1" in error.value.fix


def test_a_pattern_may_match_what_is_inside_another_match():
    net = nn.ModuleDict({"block": nn.TransformerEncoderLayer(4, 1, 4), "rest": nn.Linear(4, 4)})
    assert recompute(net, ["bl*", "block.linear*"]) == ["block"]


def test_a_buffer_that_begins_to_change_later_is_not_passed_over():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.passes = nn.Parameter(torch.ones(2)), 0
            self.register_buffer("scale", torch.ones(2))

        def forward(self, values):
            self.passes += 1
            if self.passes > 4:
                self.scale.mul_(0.5)
            return values * self.weight * self.scale

    model = nn.Sequential(Late())
    recompute(model, ["*"])
    model(torch.randn(3, 2)).sum().backward()
    with pytest.raises(UserError, match="has changed its buffer scale"):
        for _ in range(3):
            model(torch.randn(3, 2)).sum().backward()


class Scaled(nn.Module):
    """A layer that shares a table with others, and divides by a mean over passes, which it updates or replaces."""

    mean: Tensor

    def __init__(self, table: nn.Module, replaces: bool) -> None:
        super().__init__()
        self.table, self.linear, self.replaces = table, nn.Linear(6, 6), replaces
        self.register_buffer("mean", torch.ones(6))

    def forward(self, values: Tensor) -> Tensor:
        values = self.linear(values) * self.table.factors
        moved = torch.lerp(self.mean, values.detach().abs().mean(0), 0.5)
        self.mean = moved if self.replaces else self.mean.copy_(moved)
        return torch.tanh(values / self.mean)


@pytest.mark.parametrize("replaces", [False, True])
def test_second_passes_go_with_other_passes_under_way(replaces):
    """As in a pipeline, whose micro-batches go forward before the first one goes back."""
    found = []
    for patterns, early in (((), 0), (("*",), 2), (("0",), 2 * replaces)):
        torch.manual_seed(0)
        table = nn.Module()
        table.register_buffer("factors", torch.rand(6))
        model = nn.Sequential(*(Scaled(table, replaces) for _ in range(3)))
        recompute(model, patterns)
        under_way = []
        for values in torch.randn(5, 2, 6):
            under_way.append(model(values).sum())
            if len(under_way) > early:
                under_way.pop(0).backward()
        for loss in under_way:
            loss.backward()
        found.append([*(one.grad for one in model.parameters()), *model.buffers()])
    for other in found[1:]:
        for wanted, value in zip(found[0], other, strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=0)


def test_layers_that_the_task_compiles_are_named():
    inside = torch.compile(Net(), backend="eager")
    in_place = Net()
    in_place.blocks[1].compile(backend="eager")
    for model, patterns in ((inside, ["_orig_mod.blocks.*"]), (inside, ["*"]), (in_place, ["blocks.*"])):
        with pytest.raises(UserError, match=r"the task compiles (_orig_mod|blocks\.1)"):
            recompute(model, patterns)
    recompute(in_place, ["blocks.2", "out"])
    around = nn.Sequential(torch.compile(Block(), backend="eager"))
    assert recompute(around, ["*"]) == ["0"], "the compiled part is called again"


def test_the_device_whose_random_state_is_kept_is_that_of_any_argument(monkeypatch):
    """PyTorch looks for it among arguments without a name."""
    found: list[int] = []

    def kind(*given):
        found.append(sum(isinstance(one, Tensor) for one in pytree.tree_leaves(given)))
        return "cpu"

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", kind)
    model = Net()
    recompute(model, ["blocks.*"])
    model.blocks[0](values=torch.ones(3, 6)).sum().backward()
    assert found == [1]
