"""Hooks on gradients: linear ones act as in one process, others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.backends.torch.task.gradient_hooks import require_linear_hooks
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from tests.tasks.torch_tasks import cut, global_batches, make_framework, mean_loss, plain_model, plain_sgd

MASK = torch.arange(16) % 3 == 0


def scaled_in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


def fails(gradient: Tensor) -> Tensor:
    raise RuntimeError("only in a backward pass")


LINEAR: dict[str, Callable[[Tensor], Any]] = {
    "scale": lambda gradient: 0.1 * gradient,
    "mask": lambda gradient: gradient * MASK[:, None],
    "reversed": lambda gradient: -gradient,
    "centred": lambda gradient: gradient - gradient.mean(1, keepdim=True),
    "in place": scaled_in_place,
    "looks": lambda gradient: None,
    "in 16 bits": lambda gradient: gradient.bfloat16().float() if gradient.dtype == torch.bfloat16 else gradient,
    "finite": torch.nan_to_num,
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "sign": torch.sign,
    "unit norm": lambda gradient: gradient / gradient.norm(),
    "clip by norm": lambda gradient: gradient * (1 / gradient.norm()).clamp(max=1.0),
    "clamp": lambda gradient: gradient.clamp(-1, 1),
    "positive": torch.relu,
    "magnitude": torch.abs,
    "noise": lambda gradient: gradient + 1e-5 * torch.randn_like(gradient),
    "threshold": lambda gradient: gradient.where(gradient.abs() > 0.1, 0),
    "fails": fails,
}


def hooked(hook: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    model = plain_model().to(dtype)
    model[2].weight.register_hook(hook)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_hooks_stay(name, dtype):
    before = torch.get_rng_state()
    model = hooked(LINEAR[name], dtype)
    values = model[2].weight.clone()
    torch.set_rng_state(before)
    require_linear_hooks(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model[2].weight, values) and model[2].weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused_by_name(name, dtype):
    with pytest.raises(UserError, match=r"(?s)^2\.weight has a hook .*not linear.*register_step_pre_hook"):
        require_linear_hooks(hooked(OTHERS[name], dtype))


def accumulating(change: Callable[[Tensor], object]) -> nn.Module:
    model = plain_model()

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        change(parameter.grad)

    model[0].bias.register_post_accumulate_grad_hook(hook)
    return model


def test_hooks_after_accumulation_are_tried_too():
    require_linear_hooks(accumulating(lambda gradient: gradient.mul_(2)))
    require_linear_hooks(accumulating(lambda gradient: None))
    with pytest.raises(UserError, match=r"^0\.bias has a hook"):
        require_linear_hooks(accumulating(lambda gradient: gradient.clamp_(-1, 1)))


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused_and_has_changed_nothing():
    model = plain_model()
    values = model[0].weight.clone()
    inner = torch.optim.SGD([model[0].weight], lr=0.1)

    def step(parameter):
        inner.step()
        inner.zero_grad()

    model[0].weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(UserError, match="updates the parameter"):
        make_framework(alone(), lambda: model)
    assert torch.equal(model[0].weight, values)


@pytest.mark.parametrize("place", ["parameter", "module", "activation"])
def test_what_hooks_do_does_not_depend_on_the_number_of_micro_batches(place):
    """Hooks of modules and activations see gradients of the mean over the global batch, so they may limit them."""

    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain_model()
            if place == "parameter":
                self.inner[2].weight.register_hook(lambda gradient: 3 * gradient)
            if place == "module":
                self.inner[2].register_full_backward_hook(lambda module, ins, outs: (ins[0].clamp(-1e-3, 1e-3),))

        def forward(self, x):
            hidden = self.inner[:2](x)
            if place == "activation" and hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            return self.inner[2:](hidden)

    torch.manual_seed(3)
    plain = Limited()
    optimizer = plain_sgd(plain)
    framework = make_framework(alone(), Limited, optimizer=plain_sgd, accumulate=3)
    for batch in global_batches(4):
        optimizer.zero_grad()
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        mean_loss(plain(tensors["x"]), tensors).backward()
        optimizer.step()
        framework.step(cut(batch, 0, 1, accumulate=3), len(batch["x"]))
    for ours, theirs in zip(framework.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_step_hook_sees_the_averaged_gradient():
    """It is the advice that is given."""
    seen: list[Tensor] = []
    framework = make_framework(alone(), accumulate=3)
    framework.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(framework.model[0].weight.grad.clone())
    )
    batch = next(global_batches(1))
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    (wanted,) = torch.autograd.grad(mean_loss(framework.model(tensors["x"]), tensors), [framework.model[0].weight])
    framework.step(cut(batch, 0, 1, accumulate=3), len(batch["x"]))
    torch.testing.assert_close(seen, [wanted])
