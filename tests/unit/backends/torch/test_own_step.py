"""Steps of a task's own on one process: as a loop written by hand, state and all; and what is wrong with a step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpctrain.backends.torch.steps.own_step import DryActions, StepContext
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.comm.world import alone
from hpctrain.config.combinations import refuse
from hpctrain.config.sections import Config, DataConfig, TrainConfig
from hpctrain.data.order import Order
from hpctrain.errors import UserError
from hpctrain.rank.problem import task_features, with_its_loss
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import TorchScheduler, TorchTask
from hpctrain.train.framework import NonFiniteLoss
from tests.support.choices import Rehearsed
from tests.tasks import torch_own_steps as own

WHOLE = lambda: own.one(own.whole_step)  # noqa: E731
ROWS = lambda: own.one(own.own_rows_step)  # noqa: E731
WEIGHTED = lambda: own.one(own.weighted_step)  # noqa: E731


def values(framework: TorchFramework) -> dict[str, NDArray[Any]]:
    """All state by name."""
    found = {}
    for tensor in framework.state():
        found[tensor.name] = np.empty(tensor.shape, tensor.dtype)
        tensor.copy_into(found[tensor.name])
    return found


def equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Bit for bit; the random state of Python holds a NaN."""
    return np.array_equal(one, other, equal_nan=True)


def first_batch() -> dict[str, NDArray[Any]]:
    return next(own.global_batches(1))


@pytest.mark.parametrize(
    ("task", "by_hand", "accumulate"),
    [
        (own.gan, own.plain_gan, 1),
        (own.gan, own.plain_gan, 4),
        (WHOLE, own.plain_pairs, 1),
        (ROWS, own.plain_pairs, 1),
        (WEIGHTED, own.plain_weighted, 3),
    ],
    ids=["gan", "gan in micro-batches", "pairs", "pairs by rows", "weighted in micro-batches"],
)
def test_a_step_trains_as_a_loop_written_by_hand(task, by_hand, accumulate):
    framework = own.make_framework(alone(), task, accumulate=accumulate)
    own.train(framework, 8)
    np.testing.assert_allclose(own.weights(framework), own.plain(by_hand, task, 8), rtol=1e-12, atol=1e-13)


def test_rehearsals_leave_no_trace():
    wanted = own.make_framework(alone())
    rehearsed = own.make_framework(alone(), choice=Rehearsed)
    assert own.train(wanted, 3) == own.train(rehearsed, 3)
    assert own.weights(wanted) == own.weights(rehearsed)


def test_state_by_name_resumes_bit_for_bit():
    straight = own.make_framework(alone(), own.single_gan, ema_decay=0.9, precision="fp16")
    reported = own.train(straight, 7)
    first = own.make_framework(alone(), own.single_gan, ema_decay=0.9, precision="fp16")
    own.train(first, 3)
    saved = values(first)
    assert saved.keys() >= {
        "model/generator.0.weight",
        "ema/discriminator.2.bias",
        "optimizer/generator.exp_avg/generator.0.weight",
        "optimizer/discriminator.exp_avg_sq/discriminator.2.bias",
        "scaler/scale/generator",
        "step/done",
    }
    second = own.make_framework(alone(), own.single_gan, ema_decay=0.9, precision="fp16")
    second.load(saved)
    assert own.train(second, 7, begin=3) == reported[3:]
    after = values(straight)
    assert [name for name, array in values(second).items() if not equal(array, after[name])] == []


def test_the_dry_call_leaves_everything_as_it_was():
    framework = own.make_framework(alone(), ema_decay=0.9)
    own.train(framework, 2)
    before = values(framework)
    framework.dry_call(first_batch())
    after = values(framework)
    assert before.keys() == after.keys()
    assert [name for name in before if not equal(before[name], after[name])] == []
    assert own.train(framework, 3, begin=2) == own.train(own.make_framework(alone(), ema_decay=0.9), 3)[2:]


def test_what_is_reported():
    def step(ctx, batch):
        reported = own.gan_step(ctx, batch)
        for part in ctx.split(batch):
            ctx.log("first", part["x"][:, 0].mean())
        ctx.log("share", (3.0, 4))
        return reported

    framework = own.make_framework(alone(), lambda: own.gan(step=step), accumulate=4, clip_norm=1e-3)
    reported = own.train(framework, 2)
    assert set(reported[0]) == {
        "loss", "loss_generator", "loss_discriminator", "grad_norm_generator", "grad_norm_discriminator", "score",
        "first", "share",
    }  # fmt: skip
    assert reported[0]["loss"] == pytest.approx(reported[0]["loss_generator"] + reported[0]["loss_discriminator"])
    assert reported[1]["loss"] == reported[1]["loss_discriminator"], "the generator takes every second turn"
    assert reported[0]["first"] == pytest.approx(first_batch()["x"][:, 0].mean())
    assert reported[0]["share"] == 0.75
    named = own.make_framework(alone(), lambda: own.gan(step=lambda ctx, batch: {"loss": 7} | own.gan_step(ctx, batch)))
    assert own.train(named, 1)[0]["loss"] == 7


def test_clipping_and_rates_are_those_of_each_optimizer():
    def moved(factor, **train):
        def sgd():
            made = own.gan()
            optimizers = {name: torch.optim.SGD(model.parameters(), 1.0) for name, model in made.model.items()}
            return dataclasses.replace(made, optimizer=optimizers)

        framework = own.make_framework(alone(), sgd, **train)
        before = {name: array.copy() for name, array in values(framework).items()}
        framework.set_learning_rate(factor)
        own.train(framework, 1)
        after = values(framework)
        return {
            model: sum(float(((after[name] - before[name]) ** 2).sum()) for name in after if f"/{model}." in name)
            ** 0.5
            for model in ("generator", "discriminator")
        }

    assert moved(1.0, clip_norm=0.01) == pytest.approx({"generator": 0.01, "discriminator": 0.01})
    assert moved(0.5, clip_norm=0.01) == pytest.approx({"generator": 0.005, "discriminator": 0.005})


def test_low_precision_computes_with_the_new_weights_after_an_update():
    """Copies of the weights in 16 bits are kept within a step, but not over an update."""
    seen: list[list[Tensor]] = []

    def step(ctx, batch):
        points = batch["x"].float()
        before = ctx.model(points)
        ctx.backward(before.square().mean())
        ctx.update()
        seen.append([before.detach(), ctx.model(points).detach()])

    def task():
        model = nn.Linear(6, 6)
        return TorchTask(model, None, torch.optim.SGD(model.parameters(), 0.5), own.samples(), step=step)

    framework = own.make_framework(alone(), task, precision="bf16")
    framework.step([first_batch()], 15)
    ((before, after),) = seen
    assert before.dtype == after.dtype == torch.bfloat16
    assert not before.equal(after)
    with torch.autocast("cpu", torch.bfloat16):
        assert framework.model(torch.from_numpy(first_batch()["x"]).float()).equal(after)


def test_the_loss_that_is_not_finite_is_named():
    def step(ctx, batch):
        ctx.backward(ctx.models["generator"](batch["z"]).mean() * torch.inf, "generator")
        ctx.update("generator")

    framework = own.make_framework(alone(), lambda: own.gan(step=step))
    before = framework.weights_hash()
    with pytest.raises(NonFiniteLoss) as caught:
        framework.step([first_batch()], 15)
    assert caught.value.what == "the loss of generator" and caught.value.ranks == [0]
    assert framework.weights_hash() == before


def test_evaluation_and_prediction_of_several_models():
    def forward(models, batch):
        return {"image": models["generator"](batch["z"])}

    def size(outputs, batch):
        return outputs["image"].square().mean()

    framework = own.make_framework(alone(), lambda: own.gan(forward=forward, metrics={"size": size}))
    assert framework.predict(first_batch())["image"].shape == (15, 6)
    sums = framework.evaluate(first_batch())
    assert set(sums) == {"size"} and sums["size"][1] == 15
    with pytest.raises(UserError, match=r"several models .* and no forward"):
        own.make_framework(alone()).predict(first_batch())


def wrong(name: str) -> Callable[[Any, dict[str, Tensor]], Any]:
    """A step with one mistake."""

    def scores(ctx: Any, batch: dict[str, Tensor]) -> Tensor:
        made: Tensor = ctx.models["discriminator"](batch["x"])
        return made

    def unknown(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.backward(scores(ctx, batch).mean(), "critic")

    def nameless(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.backward(scores(ctx, batch).mean())

    def only_update(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.update("generator")

    def no_update(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.backward(scores(ctx, batch).mean(), "discriminator")

    def own_backward(ctx: Any, batch: dict[str, Tensor]) -> None:
        scores(ctx, batch).mean().backward()

    def own_update(ctx: Any, batch: dict[str, Tensor]) -> None:
        OPTIMIZERS[0].step()

    def returned(ctx: Any, batch: dict[str, Tensor]) -> Tensor:
        return scores(ctx, batch).mean()

    def vector(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.backward(scores(ctx, batch), "discriminator")

    def detached(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.backward(scores(ctx, batch).mean().detach(), "discriminator")

    def others(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.backward(scores(ctx, batch).mean(), "generator")

    def key(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.models["discriminator"](batch["image"])

    def one_model(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.model(batch["x"])

    def twice_weighted(ctx: Any, batch: dict[str, Tensor]) -> None:
        for _ in range(2):
            ctx.backward((scores(ctx, batch).sum(), 15), "discriminator")

    def reserved(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.log("grad_norm", 1.0)

    def no_number(ctx: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"score": scores(ctx, batch)}

    def early(ctx: Any, batch: dict[str, Tensor]) -> None:
        for part in ctx.split(batch):
            ctx.backward(scores(ctx, part).mean(), "discriminator")
            ctx.update("discriminator")

    def no_rows(ctx: Any, batch: dict[str, Tensor]) -> None:
        for _ in ctx.split({"bins": torch.zeros(7)}):
            pass

    def whole(ctx: Any, batch: dict[str, Tensor]) -> None:
        ctx.backward(scores(ctx, batch).mean(), "discriminator")
        ctx.update("discriminator")

    def pieces(ctx: Any, batch: dict[str, Tensor]) -> None:
        for part in ctx.split(batch):
            ctx.gather(scores(ctx, part))

    def nothing(ctx: Any, batch: dict[str, Tensor]) -> None:
        scores(ctx, batch).mean()

    found: Callable[[Any, dict[str, Tensor]], Any] = locals()[name]
    return found


OPTIMIZERS: list[Any] = []
LINE = r" \(test_own_step.py:\d+: `"
WRONG = {
    "unknown": (r"\(loss, 'critic'\): the task has no optimizer of this name" + LINE + "ctx.back", "generator"),
    "nameless": (r"ctx.backward\(loss\): the task has several optimizers" + LINE, "'generator', 'discriminator'"),
    "only_update": (r"ctx.update\('generator'\) without a ctx.backward\(loss, 'generator'\)" + ".*" + LINE, "backward"),
    "no_update": (r"step ended after ctx.backward without ctx.update\('discriminator'\)", "ctx.split"),
    "own_backward": ("step calls backward of a loss itself" + LINE + "scores", "ctx.backward"),
    "own_update": ("step calls the step of an optimizer itself" + LINE + "OPTIM", "ctx.update"),
    "returned": (r"step returned a tensor of shape \[\]", "dict of metrics"),
    "vector": (
        r"the loss of ctx.backward\(loss, 'discriminator'\) returned a tensor of shape \[15, 1\]" + LINE,
        "mean",
    ),
    "detached": ("does not depend on any parameter" + LINE, "detach"),
    "others": ("depends on no parameter of optimizer generator" + LINE, "detach"),
    "key": (r"step fails on the first batch: KeyError: 'image'" + LINE, r"x \[15, 6\]"),
    "one_model": ("ctx.model: the task has several models" + LINE, r"ctx.models\[...\]"),
    "twice_weighted": (r"adds a \(sum, weight\) loss to another loss" + ".*" + LINE, "add them up"),
    "reserved": ("cannot report a metric as 'grad_norm'" + LINE, "name"),
    "no_number": (r"the value of 'score' returned a tensor of shape \[15, 1\]", "scalar"),
    "early": ("in the loop over ctx.split" + ".*" + LINE, "after the loop"),
    "no_rows": (r"bins has shape \[7\] in a batch of 15 samples" + LINE, "row for each sample"),
    "whole": ("train.accumulate is 3, but step never calls ctx.split", "for part in"),
    "nothing": ("step neither calls ctx.backward nor reports anything", r"on purpose, return \{\}"),
    "pieces": ("ctx.gather: with train.accumulate: 3" + ".*" + LINE, "train.accumulate: 1"),
}
"""Message and fix of each."""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_steps(name):
    framework = own.make_framework(
        alone(), lambda: own.gan(step=wrong(name)), accumulate=3 if name in ("whole", "pieces", "early") else 1
    )
    OPTIMIZERS[:] = framework.task.optimizer.values()
    what, fix = WRONG[name]
    with pytest.raises(UserError) as caught:
        framework.dry_call(first_batch())
    assert re.search(what, caught.value.what), caught.value.what
    assert re.search(fix, caught.value.fix), caught.value.fix
    framework.close()


@pytest.mark.parametrize("step", [lambda ctx, batch: {}, lambda ctx, batch: ctx.log("skipped", 1.0)])
def test_a_step_may_skip_the_first_batch_if_it_says_so(step):
    with closing(own.make_framework(alone(), lambda: own.gan(step=step))) as framework:
        framework.dry_call(first_batch())


def shared() -> TorchTask:
    made = own.gan()
    both = [parameter for model in made.model.values() for parameter in model.parameters()]
    return dataclasses.replace(made, optimizer={**made.optimizer, "all": torch.optim.SGD(both, 0.1)})


def idle() -> TorchTask:
    made = own.gan()
    made.model["generator"].requires_grad_(False)
    return made


def by_lbfgs() -> TorchTask:
    made = own.gan()
    optimizer = torch.optim.LBFGS(made.model["generator"].parameters())
    return dataclasses.replace(made, optimizer={**made.optimizer, "generator": optimizer})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (shared, r"both optimizer\['generator'\] and optimizer\['all'\] of the task update generator.0.weight"),
        (idle, r"optimizer\['generator'\] of the task has no parameter that requires a gradient"),
        (by_lbfgs, "LBFGS evaluates the loss several times"),
        (lambda: own.gan(model={"keys": own.perceptron(3, 6)}), "cannot have the name 'keys'"),
        (lambda: own.gan(model={"generator": "a string"}), r"model\['generator'\] of the task is a str"),
    ],
    ids=["shared", "idle", "lbfgs", "name", "kind"],
)
def test_models_and_optimizers_that_do_not_go_together(task, message):
    with pytest.raises(UserError, match=message):
        own.make_framework(alone(), task)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": None}, "model of the task is a dict, and the task has no step"),
        ({"optimizer": {"generator": None}}, r"optimizer\['generator'\] of the task is missing"),
        ({"model": {}}, "model of the task is missing"),
        ({"loss": 3}, "loss of the task is int 3"),
        ({"step": 3, "loss": None}, "step of the task is int 3"),
        ({"step": lambda ctx: None, "loss": None}, r"step of the task takes \(ctx\), not \(ctx, batch\)"),
    ],
)
def test_fields_of_a_wrong_kind(changes, message):
    with pytest.raises(UserError, match=message):
        with_its_loss(dataclasses.replace(own.gan(loss=own.real), **changes), ("x", "z"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": TorchScheduler(torch.optim.lr_scheduler.ConstantLR)}, "TorchScheduler sets the rates of one"),
        ({"validation": own.samples()}, "neither loss nor metrics"),
        ({"validation": own.samples(), "loss": own.real}, "several models, but no forward"),
    ],
)
def test_what_does_not_go_with_a_step(changes, message):
    config = Config(name="run", task="a:b", train=TrainConfig(steps=1, global_batch=15), data=DataConfig())
    order = Order(length=45, global_batch=15)
    refuse(config.features() | task_features(config.task, own.gan(), order, 4))
    with pytest.raises(UserError, match=message):
        refuse(config.features() | task_features(config.task, own.gan(**changes), order, 4))


def test_every_rank_needs_a_sample_of_every_batch():
    config = Config(name="run", task="a:b", train=TrainConfig(steps=1, global_batch=15))
    order = Order(length=48, global_batch=15)
    refuse(task_features(config.task, own.gan(), order, 3))
    refuse(task_features(config.task, own.gan(), dataclasses.replace(order, drop_last=True), 4))
    with pytest.raises(UserError, match="all 4 ranks, and the last batch of an epoch has only 3 samples"):
        refuse(task_features(config.task, own.gan(), order, 4))


def test_all_ranks_cut_their_batches_into_as_many_parts():
    parts = own.make_framework(alone(), accumulate=4).program.parts  # type: ignore[union-attr]
    cut = {}
    for rows in (slice(0, 3), slice(3, 5)):
        context = StepContext(parts, DryActions(parts), rows, global_samples=5, step=0, ranks=2)
        cut[rows.start] = [len(part["x"]) for part in context.split({"x": torch.zeros(rows.stop - rows.start, 6)})]
    assert cut == {0: [2, 1], 3: [1, 1]}


@pytest.mark.parametrize("choice", [ReducerChoice, Rehearsed])
def test_what_a_step_does_to_parameters_is_undone_after_trials(choice):
    """Such as the bounds of a Wasserstein critic, and the average that a target network is."""

    def bounded(ctx, batch):
        ctx.backward(ctx.model(batch["x"]).square().mean())
        ctx.update()
        for parameter in ctx.model.parameters():
            parameter.data.mul_(0.5)

    found = []
    for tries in (False, True):
        framework = own.make_framework(alone(), lambda: own.one(bounded), choice=choice if tries else ReducerChoice)
        if tries:
            framework.dry_call(first_batch())
        own.train(framework, 1)
        found.append(own.weights(framework))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("first", [1, 2], ids=["a layer", "all layers"])
def test_a_step_may_freeze_parameters_at_first(first):
    def warms_up(ctx, batch):
        parameters = list(ctx.model.parameters())
        for parameter in parameters[: len(parameters) * first // 2]:
            parameter.requires_grad_(ctx.step > 0)
        ctx.backward(ctx.model(batch["x"].requires_grad_()).square().mean())
        ctx.update()

    framework = own.make_framework(alone(), lambda: own.one(warms_up))
    weights = next(framework.model.parameters())
    before = weights.detach().clone()
    framework.dry_call(first_batch())
    own.train(framework, 1)
    assert torch.equal(weights, before)
    own.train(framework, 2, begin=1)
    assert not torch.equal(weights, before)
