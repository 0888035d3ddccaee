"""The passes of one update: what is said when autograd fails."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.backends.torch.reduce.reducer import NoReducer
from hpctrain.backends.torch.reduce.slots import norm_of
from hpctrain.backends.torch.steps.updates import GradientAccumulation, OptimizerStep
from hpctrain.backends.torch.strategies.parameter_traits import ELEMENTWISE
from hpctrain.backends.torch.strategies.partition import squares_of, uncut
from hpctrain.backends.update import UpdateRule
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.config.sections import TrainConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.train.clock import NO_CLOCK
from hpctrain.train.framework import NonFiniteLoss
from hpctrain.train.stateful import value_of
from tests.tasks.points import cut
from tests.tasks.torch_tasks import (
    decaying,
    freeze_and_thaw,
    global_batches,
    make_framework,
    mean_loss,
    plain_model,
    train,
    weighted_loss,
)
from tests.unit.backends.torch.test_gradients import loss, network, streamed


class Halved(torch.autograd.Function):
    """An operation of a task, whose own backward is wrong."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values / 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient @ torch.ones(7, 7)


@pytest.mark.parametrize("kind", [kind for kind in ELEMENTWISE if kind is not torch.optim.SparseAdam])
def test_optimizers_update_parts_to_the_bits_of_a_whole_step(kind):
    weights = []
    for parts in ([[0, 1, 2, 3]], [[2, 3], [0], [1]]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 3))
        parameters = list(model.parameters())
        optimizer = kind(parameters, lr=0.1)  # type: ignore[call-arg]
        for _ in range(4):
            grads = [torch.randn_like(parameter) for parameter in parameters]
            for part in parts:
                for index, parameter in enumerate(parameters):
                    parameter.grad = grads[index] if index in part else None
                optimizer.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("hook", ["pre", "post", "replaced"])
def test_what_watches_an_optimizer_sees_whole_gradients_and_changes_no_message(hook):
    """It may be on one rank only."""
    found = []
    for watched in (False, True):
        model = network()
        optimizer, whole = torch.optim.SGD(model.parameters(), lr=0.1), list[bool]()

        def watch(*given, model=model, whole=whole):
            whole.append(all(parameter.grad is not None for parameter in model.parameters()))

        optimizer_step = OptimizerStep(optimizer, [], [], TrainConfig(steps=1), UpdateRule(None, None), uncut().norm)
        reducer, recorder, arrivals = streamed(model)
        if watched and hook == "replaced":
            optimizer.step = lambda step=optimizer.step: (watch(), step())  # type: ignore[assignment,misc]
        elif watched:
            getattr(optimizer, f"register_step_{hook}_hook")(watch)
        accumulation = GradientAccumulation(reducer, 1.0, 5)
        accumulation.add(loss(model), 5)
        optimizer_step.update(reducer, accumulation.exchange()[0], NO_CLOCK)
        assert whole == [True] * watched
        found.append((recorder.sent, arrivals, torch.cat([one.detach().flatten() for one in model.parameters()])))
    assert found[0][:2] == found[1][:2] and torch.equal(found[0][2], found[1][2])


def twice(hidden: Tensor) -> Tensor:
    total = hidden.exp().sum()
    total.backward()
    return total


def overwritten(hidden: Tensor) -> Tensor:
    squares = hidden.exp()
    total = squares.sum()
    squares += 1
    return total


@pytest.mark.parametrize(
    ("loss", "kind", "what", "fix"),
    [
        (overwritten, UserError, "has been modified by an inplace operation", "write x = x \\+ 1 for x \\+= 1"),
        (twice, UserError, "through the graph a second time", "Detach what the model keeps"),
        (lambda hidden: Halved.apply(hidden).sum(), RunFailed, "@ torch.ones\\(7, 7\\)`", "set_detect_anomaly"),
    ],
)
def test_a_loss_without_a_gradient_is_told_in_a_sentence(loss, kind, what, fix):  # type: ignore[no-untyped-def]
    model = nn.Linear(2, 2)
    accumulation = GradientAccumulation(NoReducer(list(model.named_parameters())), 1.0, 3)
    with pytest.raises(kind, match=f"(?s)the backward pass fails: .*{what}.*fix: .*{fix}") as caught:
        accumulation.add(loss(model(torch.ones(3, 2))), 3)
    assert "\n" not in caught.value.what


def test_what_is_no_error_of_autograd_passes_through():
    def lost(total):
        raise torch.OutOfMemoryError("no memory")

    model = nn.Linear(2, 2)
    accumulation = GradientAccumulation(NoReducer(list(model.named_parameters())), 1.0, 3)
    with pytest.raises(torch.OutOfMemoryError):
        accumulation.add(model(torch.ones(3, 2)).sum(), 3, lost)


def test_frozen_layers_stay_as_they_are_and_train_again_later():
    framework = make_framework(alone(), optimizer=decaying)
    model = copy.deepcopy(framework.model)
    optimizer = decaying(model)
    for step, batch in enumerate(global_batches(8)):
        model[0].requires_grad_(step not in (0, 1, 4, 5))
        optimizer.zero_grad()
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        mean_loss(model(tensors["x"]), tensors).backward()
        optimizer.step()
    wanted = torch.cat([one.detach().flatten() for one in model.parameters()])
    torch.testing.assert_close(torch.from_numpy(freeze_and_thaw(framework)), wanted)


def test_a_layer_that_was_frozen_when_training_began_is_not_thawed_unnoticed():
    def partly_frozen():
        model = plain_model()
        model.get_submodule("2").requires_grad_(False)
        return model

    framework = make_framework(alone(), partly_frozen)
    train(framework, 1)
    framework.model[2].weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"2\.weight of the model was unfrozen after the run had started"):
        train(framework, 1)
    framework.close()


def fused_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize(
    ("optimizer", "loss", "options"),
    [
        (fused_sgd, mean_loss, {}),
        (fused_adamw, weighted_loss, {"ema_decay": 0.9}),
        (fused_adamw, mean_loss, {"clip_norm": 0.3}),
        (fused_adamw, weighted_loss, {"precision": "fp16", "clip_norm": 0.3, "ema_decay": 0.9}),
    ],
)
def test_a_step_launched_before_the_loss_is_read_gives_the_same_bits(  # type: ignore[no-untyped-def]
    optimizer, loss, options, monkeypatch
):
    """Also if gradients overflow in 16 bits, which skips the first updates."""
    states, launched = [], list[bool]()
    plain = OptimizerStep.step_ahead

    def step_ahead(self, *given):
        launched.append(True)
        plain(self, *given)
        assert not hasattr(self.optimizer, "found_inf")

    monkeypatch.setattr(OptimizerStep, "step_ahead", step_ahead)
    for ahead in (False, True):
        framework = make_framework(alone(), loss=loss, optimizer=optimizer, **options)
        framework.parts.optimizer_steps[""] = replace(framework.parts.optimizer_steps[""], steps_ahead=ahead)  # type: ignore[index]
        if "precision" in options:
            framework.parts.optimizer_steps[""].rule.loss_scale.state[0] = 2.0**30
        losses = train(framework, 24)
        states.append([np.array(losses), *(np.array(value_of(one)) for one in framework.state())])
        framework.close()
    assert len(launched) == 24 - (optimizer is fused_sgd), "SGD makes its momentum first"
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_launched_before_the_loss_is_read_is_skipped_if_that_is_not_finite(clip):
    framework = make_framework(alone(), optimizer=fused_adamw, clip_norm=clip)
    framework.parts.optimizer_steps[""] = replace(framework.parts.optimizer_steps[""], steps_ahead=True)  # type: ignore[index]
    train(framework, 2)
    weights = framework.flat_weights(Group("alone"), None).weights
    before = weights()
    batch = next(global_batches(1))
    batch["x"][0] = np.nan
    with pytest.raises(NonFiniteLoss):
        framework.step(cut(batch, 0, 1), len(batch["x"]))
    np.testing.assert_array_equal(weights(), before)
    assert framework.optimizer.state[framework.model[0].weight]["step"] == 2
    framework.close()


@pytest.mark.parametrize("factors", [0.5, [0.5, 0.25]])
def test_groups_that_a_hook_adds_follow_the_schedule(factors):
    framework = make_framework(alone(), optimizer=lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1))
    train(framework, 1)
    framework.optimizer.add_param_group({"params": list(framework.model[2].parameters()), "lr": 0.2})
    framework.set_learning_rate(factors)
    train(framework, 1)
    assert [group["lr"] for group in framework.optimizer.param_groups] in ([0.05, 0.1], [0.05, 0.05])


def test_norms_of_16_bits_have_the_digits_of_32():
    gradients = [torch.full((1000,), 1.01, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float64)]
    wanted = float(torch.cat([one.double() for one in gradients]).norm())
    assert float(norm_of(gradients)) == pytest.approx(wanted, rel=1e-6), "bfloat16 has 3 digits"
    assert float(squares_of(gradients[:1]).sum()) == pytest.approx(float(gradients[0].double().norm()) ** 2, rel=1e-6)
    assert float(norm_of([torch.full((1000,), 3e4, dtype=torch.float16)])) < np.inf


def test_the_counter_of_a_scheduler_does_not_watch_steps():
    framework = make_framework(alone())
    torch.optim.lr_scheduler.StepLR(framework.optimizer, 1)
    optimizer_step = framework.parts.optimizer_steps[""]
    assert not optimizer_step._is_watched
    framework.optimizer.step = lambda *_: None
    assert optimizer_step._is_watched
