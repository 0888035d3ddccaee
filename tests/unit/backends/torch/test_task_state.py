"""State outside of the model: what is saved is there again after a resume, what cannot be saved is refused by name."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.backends.torch.state.torch_leaves import TorchLeaves
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.checkpoint.hook import CheckpointHook
from hpctrain.checkpoint.policy import policy_of
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.config.sections import CheckpointConfig
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData
from hpctrain.errors import UserError
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.train.clock import IntervalClock
from hpctrain.train.loop import Trainer
from hpctrain.train.schedule import Duration
from hpctrain.train.state import Placement, TrainState
from hpctrain.train.stateful import value_of
from hpctrain.train.tree import tree_tensors, tree_value
from tests.support.choices import Rehearsed
from tests.tasks.torch_tasks import make_framework, mean_loss, plain_model, samples, sgd, train

Optimizer = torch.optim.Optimizer


def saved(framework: TorchFramework) -> dict[str, np.ndarray]:
    return {tensor.name: value_of(tensor) for tensor in framework.state()}


def resumes(make: Callable[[], TorchFramework]) -> set[str]:
    """Whether 7 + 7 updates are 14; the names of what was saved."""
    first = make()
    train(first, 7)
    arrays = saved(first)
    straight = train(first, 7)
    second = make()
    second.load(arrays)
    assert saved(second).keys() == arrays.keys()
    assert train(second, 7) == straight
    assert first.weights_hash() == second.weights_hash()
    return set(arrays)


def halves(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    """Two optimizers, each of some of the parameters, with different rates."""
    parameters = list(model.parameters())
    return torch.optim.Adam(parameters[:3], lr=0.01), torch.optim.SGD(parameters[3:], lr=0.05, momentum=0.9)


class SharedGroups(Optimizer):
    """Passes on the inner ones' groups."""

    def __init__(self, *inner: Optimizer) -> None:
        self.inner = list(inner)
        super().__init__([group for one in inner for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for one in self.inner:
            one.step()


class OwnGroups(Optimizer):
    """Has groups of its own, and the inner ones in a dict of a dict."""

    def __init__(self, *inner: Optimizer) -> None:
        super().__init__([each for one in inner for group in one.param_groups for each in group["params"]], {"lr": 1.0})
        self.inner = {"by": {"name": inner}}

    def step(self, closure: Any = None) -> None:
        for one in self.inner["by"]["name"]:
            one.step()


class MergedState(SharedGroups):
    """Makes its state up from the inner ones' at each look."""

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        return {key: value for one in self.inner for key, value in one.state.items()}

    @state.setter
    def state(self, value: Any) -> None: ...


class NoOptimizerAtAll:
    """Has what is called, and no more."""

    def __init__(self, *inner: Optimizer) -> None:
        def step() -> None:
            for one in inner:
                one.step()

        self.step = step
        self.param_groups = [group for one in inner for group in one.param_groups]


class SharpnessAware(Optimizer):
    """Shares the inner one's mapping of state, and adds to it."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.state = base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                old = self.state[parameter].setdefault("old", parameter.clone())
                parameter.lerp_(old, 0.1)
                old.copy_(parameter)


class Lookahead(Optimizer):
    """Slow weights in one of many places, and a count in an attribute."""

    def __init__(self, base: Optimizer, place: str) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.count = 0
        self.parameters = [parameter for group in base.param_groups for parameter in group["params"]]
        copies = {parameter: parameter.detach().clone() for parameter in self.parameters}
        self.slow: Any = {
            "list": list(copies.values()),
            "dict": copies,
            "ids": {id(parameter): slow for parameter, slow in copies.items()},
            "groups": None,
        }[place]
        if place == "groups":
            for group in self.param_groups:
                group["slow_norm"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.slow is None:
            for group in self.param_groups:
                group["slow_norm"] += sum(parameter.norm() for parameter in group["params"])
                for parameter in group["params"]:
                    parameter.mul_(1 - 1e-4 * group["slow_norm"])
        elif self.count % 3 == 0:
            slow = self.slow.values() if isinstance(self.slow, dict) else self.slow
            for parameter, one in zip(self.parameters, slow, strict=True):
                one.lerp_(parameter, 0.5)
                parameter.copy_(one)


class Speaking(Optimizer):
    """Clips by the history of norms, which only its own methods save."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.history: deque[float] = deque(maxlen=5)

    def step(self, closure: Any = None) -> None:
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        self.history.append(float(torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients]))))
        for one in gradients:
            one.div_(sum(self.history))
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "history": list(self.history), "none": None, "pair": (True, "x")}

    def load_state_dict(self, state: Any) -> None:
        assert state["none"] is None and state["pair"] == (True, "x")
        self.base.load_state_dict(state["base"])
        self.history.extend(state["history"])


class WithNetwork(Optimizer):
    """Its rate comes from a network, which it trains itself."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.net = nn.BatchNorm1d(1, affine=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.net(parameter.grad.reshape(-1, 1).repeat(2, 1))
                self.net.bias += 1e-3
                parameter.sub_(group["lr"] * (1 + self.net.bias) * parameter.grad / self.net.running_var.sqrt())


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "shared groups": lambda model: SharedGroups(*halves(model)),
    "own groups": lambda model: OwnGroups(*halves(model)),
    "merged state": lambda model: MergedState(*halves(model)),
    "duck": lambda model: NoOptimizerAtAll(*halves(model)),
    "nested": lambda model: SharedGroups(SharedGroups(*halves(model))),
    "shared state": lambda model: SharpnessAware(sgd(model)),
    "tensors in groups": lambda model: Lookahead(sgd(model), "groups"),
    "speaking": lambda model: Speaking(sgd(model)),
    "with a network": lambda model: WithNetwork(model.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_hold_more_than_their_own_state_resume(name):
    names = resumes(lambda: make_framework(alone(), optimizer=OPTIMIZERS[name]))
    assert any(one.startswith(("optimizer/", "held/optimizer/")) for one in names)


def left_out(framework: TorchFramework) -> list[str]:
    """What is said to be left out, after two updates that are each looked at."""
    for _ in range(2):
        train(framework, 1)
        names = {tensor.name for tensor in framework.state()}
    assert not any("/own/" in name for name in names)
    return sorted(framework.facts.undeclared)


@pytest.mark.parametrize("place", ["list", "dict", "ids"])
def test_what_an_optimizer_keeps_in_attributes_is_said_to_be_left_out(place):
    framework = make_framework(alone(), optimizer=lambda model: Lookahead(sgd(model), place))
    train(framework, 2)  # the third update changes the slow weights, too
    assert framework.facts.undeclared == ()
    framework.state()
    found = framework.facts.undeclared
    assert found == ("optimizer: count",)


class Each(Optimizer):
    """An optimizer of each parameter, in a dict."""

    def __init__(self, parameters: Iterable[Tensor], key: Callable[[Tensor], Any]) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 1.0})
        self.inner = {key(each): torch.optim.Adam([each], lr=0.01) for each in parameters}

    def step(self, closure: Any = None) -> None:
        for one in self.inner.values():
            one.step()


@pytest.mark.parametrize("key", [id, lambda parameter: parameter])
def test_state_by_parameter_or_its_id_has_the_parameters_name(key):
    names = resumes(lambda: make_framework(alone(), optimizer=lambda model: Each(model.parameters(), key)))
    assert {f"optimizer/inner.{name}.exp_avg/{name}" for name, _ in plain_model().named_parameters()} <= names


def test_state_by_ids_of_other_objects_is_refused():
    model = plain_model()
    ids = {id(parameter): id(module) for module in model for parameter in module.parameters()}
    with pytest.raises(UserError, match=r"the optimizer holds state at inner\.\d+, where a key is an object's id"):
        make_framework(
            alone(), model=lambda: model, optimizer=lambda model: Each([model[0].weight], lambda each: ids[id(each)])
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_saved_of_an_optimizer_is_not_said_to_be_left_out(name):
    framework = make_framework(alone(), optimizer=OPTIMIZERS[name])
    assert left_out(framework) == (["optimizer: count"] if name == "tensors in groups" else [])


@pytest.mark.parametrize("name", ["shared groups", "own groups", "merged state", "duck", "nested", "speaking"])
def test_the_schedule_reaches_inner_optimizers_before_and_after_a_resume(name):
    framework = make_framework(alone(), optimizer=OPTIMIZERS[name])
    framework.set_learning_rate(0.5)
    train(framework, 1)
    framework.load(saved(framework))
    framework.set_learning_rate(0.1)
    before = framework.weights_hash()
    framework.set_learning_rate(0.0)
    train(framework, 3)
    assert framework.weights_hash() == before


class Late(Optimizer):
    """Makes its state in the first update, where nothing else than itself finds it."""

    def __init__(self, parameters: Iterable[Tensor], keep: str) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        if self.keep == "string":
            self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        elif self.keep == "momentum":
            past = vars(self).setdefault("past", [torch.zeros_like(each) for each in group["params"]])
            for one, each in zip(past, group["params"], strict=True):
                one.lerp_(each, 0.5)
        elif self.keep == "constant":
            vars(self).setdefault("past", len(group["params"]))
        for each in group["params"]:
            each.sub_(group["lr"] * each.grad)


def test_state_of_what_is_no_parameter_is_refused_by_name():
    framework = make_framework(alone(), optimizer=lambda model: Late(model.parameters(), "string"))
    train(framework, 1)
    with pytest.raises(UserError, match="Late keeps state under 'all'"):
        framework.state()


@pytest.mark.parametrize("keep", ["momentum", "nothing", "constant"])
def test_what_an_optimizer_makes_and_changes_in_its_updates_is_said_to_be_left_out(keep):
    framework = make_framework(alone(), optimizer=lambda model: Late(model.parameters(), keep))
    assert left_out(framework) == [f"optimizer: past.{index}" for index in range(6 if keep == "momentum" else 0)]


@pytest.mark.parametrize("keep", ["nothing", "constant"])
def test_an_optimizer_without_state_is_no_suspect(keep):
    names = resumes(lambda: make_framework(alone(), optimizer=lambda model: Late(model.parameters(), keep)))
    assert not any("optimizer" in name for name in names)


def test_an_optimizer_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"neither is nor holds a torch\.optim\.Optimizer"):
        make_framework(alone(), optimizer=lambda model: object())  # type: ignore[arg-type,return-value]


def test_an_inner_optimizer_of_another_model_is_refused():
    with pytest.raises(UserError, match="not parameters of the task's model"):
        make_framework(alone(), optimizer=lambda model: OwnGroups(sgd(model), sgd(plain_model())))


class Centred(nn.Module):
    """A loss with a buffer that it replaces, one that it does not save, and a parameter that follows behind."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.follower = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
            self.follower.data.mul_(0.5).add_(self.center)
        return mean_loss(outputs - self.center + self.follower, batch)


class Annealed:
    """A loss that counts in attributes: a number, an array, a tensor."""

    def __init__(self) -> None:
        self.calls = 0
        self.total = np.zeros(2)
        self.scalar = np.float32(0)
        self.mean = torch.zeros(())
        self.log: list[float] = []
        self.last: Tensor | None = None

    def __call__(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = mean_loss(outputs, batch)
        if torch.is_grad_enabled():
            self.calls += 1
            self.total += [1, 0.5]
            self.scalar = np.float32(self.scalar + 0.25)
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            self.log.append(float(loss.detach()))
            self.last = outputs.detach()
        return loss * (1 + 1 / (1 + self.calls) + self.total.sum() + self.mean + float(self.scalar))


class Holding:
    """Has a module in an attribute."""

    def __init__(self) -> None:
        self.inner = Centred()

    def method(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.inner(outputs, batch)
        return loss


class Spoken:
    """Says itself what its state is."""

    def __init__(self) -> None:
        self.hidden: dict[Any, float] = {(0,): 1.0}

    def __call__(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self.hidden[(0,)] *= 1.1
        return self.hidden[(0,)] * mean_loss(outputs, batch)

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.hidden[(0,)]}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.hidden[(0,)] = state["factor"]


class Extra(nn.Module):
    """A count that is extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"calls": 0, "seen": [torch.zeros(2), np.zeros(2)], 3: None}

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.state["calls"] += 1
            self.state["seen"] = [one + 0.5 for one in self.state["seen"]]
        scale: Tensor = self.state["seen"][0].sum() + self.state["seen"][1].sum()
        return x * (1 + scale / (1 + self.state["calls"]))

    def get_extra_state(self) -> dict[str, Any]:
        return self.state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state.keys() == self.state.keys()
        self.state = state


def noisy() -> Callable[..., Tensor]:
    """Draws from generators of the task's own."""
    ours, numpy, python = torch.Generator().manual_seed(1), np.random.default_rng(2), random.Random(3)

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        noise = torch.rand((), generator=ours) + numpy.random() + python.gauss(0, 1)
        return mean_loss(outputs, batch) * (1 + noise)

    return loss


def closure(criterion: Callable[..., Tensor], counts: bool) -> Callable[..., Tensor]:
    calls = 0

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += counts
        return criterion(outputs, batch) * (1 + 1 / (1 + calls))

    return loss


def extra_loss() -> Callable[..., Tensor]:
    inner = Extra()
    return lambda outputs, batch: mean_loss(inner(outputs), batch)


criterion = Centred()


def through_a_global(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return helper(outputs, batch)


def helper(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = criterion(outputs, batch)
    return loss


def fresh_global() -> Callable[..., Tensor]:
    globals()["criterion"] = Centred()
    return through_a_global


LOSSES: dict[str, Callable[[], Callable[..., Any]]] = {
    "module": Centred,
    "closure over a module": lambda: closure(Centred(), counts=False),
    "partial": lambda: functools.partial(lambda inner, outputs, batch: inner(outputs, batch), Centred()),
    "method": lambda: Holding().method,
    "speaking object": Spoken,
    "extra state": extra_loss,
    "generators": noisy,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_state_resumes(name):
    names = resumes(lambda: make_framework(alone(), loss=LOSSES[name]()))
    assert any(one.startswith(("held/loss/", "rng/held/loss")) for one in names)


def test_generators_of_the_tasks_own_begin_other_streams_at_another_number_of_ranks():
    framework = make_framework(alone(), loss=noisy())
    drawn = []
    for step in (0, 5, 6):
        framework.reseed(step)
        held = {name: array.tobytes() for name, array in saved(framework).items() if name.startswith("rng/held/")}
        drawn.append(held)
    changed = {name.split("/")[4] for name in drawn[0] if len({one[name] for one in drawn}) == 3}
    assert changed == {"numpy", "ours", "python"}


@pytest.mark.parametrize("differ", [False, True])
def test_generators_of_the_tasks_own_draw_the_same_on_ranks_of_one_model(differ):
    class Two(Group):
        def same(self, number, *_, **__):
            return not differ

    world = dataclasses.replace(alone(), tensor=Two("tensor"))
    world.tensor.size = 2
    framework = make_framework(alone(), loss=noisy())
    source = dataclasses.replace(framework.source, parts=dataclasses.replace(framework.parts, world=world))
    before = source.task_state.generators_checksum()
    source.reseed(0)
    assert (source.task_state.generators_checksum() != before) == differ


def test_a_loss_in_a_global_of_a_function_that_it_calls_resumes():
    first = make_framework(alone(), loss=fresh_global())
    train(first, 3)
    arrays = saved(first)
    straight = train(first, 3)
    second = make_framework(alone(), loss=fresh_global())
    second.load(arrays)
    assert train(second, 3) == straight
    assert "held/loss/module/helper.criterion.center" in arrays


def test_buffers_of_a_loss_are_each_ranks_own_and_its_parameters_are_not():
    framework = make_framework(alone(), loss=Centred())
    placement = {tensor.name: tensor.placement for tensor in framework.state()}
    assert placement["held/loss/module/center"] is Placement.RANK
    assert placement["held/loss/module/follower"] is Placement.REPLICATED
    assert "held/loss/module/cache" not in placement


def test_what_changes_in_attributes_of_a_loss_is_said_to_be_left_out_unless_it_is_written_down_only():
    names = ["calls", "mean", "scalar", "total"]
    assert left_out(make_framework(alone(), loss=Annealed())) == [f"loss: {name}" for name in names]
    counting = closure(Annealed(), counts=True)
    found = left_out(make_framework(alone(), loss=counting))
    assert found == sorted(["loss: calls", *(f"loss: criterion.{name}" for name in names)])


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_saved_of_a_loss_is_not_said_to_be_left_out(name):
    assert left_out(make_framework(alone(), loss=LOSSES[name]())) == []


def test_a_state_that_has_no_place_any_more_is_told():
    framework = make_framework(alone(), loss=Centred())
    with pytest.raises(UserError, match=r"held/loss/module/center was saved, and the task has no place for it"):
        make_framework(alone()).load(saved(framework))


def test_a_forward_with_state_resumes():
    def make():
        inner = Extra()
        return make_framework(alone(), forward=lambda model, batch: inner(model(batch["x"])))

    assert any(name.startswith("held/forward/extra/inner/") for name in resumes(make))


def test_extra_state_of_a_model_resumes():
    names = resumes(lambda: make_framework(alone(), model=lambda: nn.Sequential(*plain_model(), Extra())))
    assert "held/model/extra/5/structure" in names


def test_the_names_and_shapes_of_extra_state_stay_while_its_numbers_change():
    framework = make_framework(alone(), model=lambda: nn.Sequential(*plain_model(), Extra()))
    train(framework, 1)
    before = {name: array.shape for name, array in saved(framework).items()}
    train(framework, 30)
    assert {name: array.shape for name, array in saved(framework).items()} == before


def test_extra_state_that_cannot_be_saved_is_refused_by_name():
    class Odd(Extra):
        def get_extra_state(self):
            return {"deep": [object()]}

    with pytest.raises(UserError, match=r"the extra state of Odd, deep, 0 is an object, which cannot be saved"):
        make_framework(alone(), model=lambda: nn.Sequential(*plain_model(), Odd())).state()


def test_extra_state_that_cannot_be_put_back_is_refused_by_name():
    class Mute(nn.Identity):
        def get_extra_state(self):
            return 3

    with pytest.raises(UserError, match="Mute has get_extra_state and no set_extra_state"):
        make_framework(alone(), model=lambda: nn.Sequential(*plain_model(), Mute()))


@pytest.mark.parametrize("name", [*LOSSES, "extra state of the model"])
def test_rehearsals_leave_the_state_of_a_loss_as_it_was(name):
    def make(choice):
        if name in LOSSES:
            return make_framework(alone(), loss=LOSSES[name](), choice=choice)
        return make_framework(alone(), model=lambda: nn.Sequential(*plain_model(), Extra()), choice=choice)

    assert train(make(Rehearsed), 3) == train(make(ReducerChoice), 3)


class Averaging(Annealed):
    """Changes memory in place, makes attributes, counts calls without gradients, too, and looks back at a list."""

    calls_ever: int

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.zeros(2)
        self.frozen = torch.zeros(1).expand(3)

    def __call__(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls_ever = getattr(self, "calls_ever", 0) + 1
        self.place += 0.5
        return super().__call__(outputs, batch) * (self.place.sum() + len(self.log) + self.calls_ever)


PLAIN: dict[str, Callable[[], Callable[..., Any]]] = {
    "object": Averaging,
    "closure over an object": lambda: closure(Averaging(), counts=True),
    "method": lambda: Averaging().__call__,
}


@pytest.mark.parametrize("name", PLAIN)
def test_rehearsals_and_the_dry_call_leave_plain_attributes_as_they_were(name):
    def make(choice):
        return make_framework(alone(), loss=PLAIN[name](), choice=choice)

    rehearsed = make(Rehearsed)
    rehearsed.dry_call({name: array[:4] for name, array in samples().items()})
    assert train(rehearsed, 3) == train(make(ReducerChoice), 3)


class Counted:
    """A loss that grows with each call, by values of all kinds."""

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {"times": 0, "sum": None}

    def __call__(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls["times"] += 1
        self.calls["sum"] = outputs.detach().sum() if self.calls["sum"] is None else self.calls["sum"] + 1
        return mean_loss(outputs, batch) * self.calls["times"]

    def state_dict(self) -> dict[str, Any]:
        return self.calls

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.calls = saved


def test_declared_state_has_one_name_and_rehearsals_and_the_dry_call_leave_it(tmp_path):
    counted = Counted()
    framework = make_framework(alone(), loss=counted, state={"calls": counted}, choice=Rehearsed)
    assert not [tensor.name for tensor in framework.state() if tensor.name.startswith("held/")]
    framework.dry_call({name: array[:4] for name, array in samples().items()})
    assert counted.calls == {"times": 0, "sum": None}
    train(framework, 3)
    assert counted.calls["times"] == 3
    plain = Counted()
    train(make_framework(alone(), loss=plain), 3)
    assert counted.calls["sum"] == plain.calls["sum"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_come_back_with_their_types(dtype):
    value = {"x": torch.arange(6).reshape(2, 3).T.to(dtype)}
    leaves = TorchLeaves(torch.device("cpu"))
    found = tree_tensors("t", value, Placement.RANK, leaves, "it")
    back = tree_value({one.name.removeprefix("t/"): value_of(one) for one in found}, leaves, "it")
    assert back["x"].dtype == dtype and torch.equal(back["x"], value["x"])


def test_what_is_left_out_is_named_once_after_two_steps(tmp_path, capsys):
    framework = make_framework(alone(), optimizer=lambda model: Late(model.parameters(), "momentum"), loss=Annealed())
    data = TrainingData(open_dataset(samples()), Order(183, 30, seed=0), 0, 1, prefetch=0)
    config = CheckpointConfig(every_steps=1)
    identity = {"config": {}, "global_batch": 30, "data": ""}
    hook = CheckpointHook(CheckpointStore(tmp_path), policy_of(config), config, identity, lambda *event, **fields: None)
    trainer = Trainer(
        alone(), framework, lambda step: 1.0, Duration(5, 6), IntervalClock(), TrainState(), data, {}, [hook]
    )
    with closing(hook), closing(data):
        trainer.fit()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    named = "loss: calls, loss: total, loss: scalar, loss: mean, optimizer: past.0, ..."
    assert len(said) == 1 and f"leave out what changes here: {named};" in said[0] and "state={...}" in said[0]


class CountsPasses(nn.Module):
    """Counts its passes in an attribute, and draws from a generator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes, self.random = nn.Linear(12, 3), 0, torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        outputs: Tensor = self.layer(x) * (1 + self.passes + torch.rand((), generator=self.random))
        return outputs


def test_what_a_model_keeps_besides_its_tensors_is_undone_after_a_trial_and_saved_or_named():
    framework, batch = make_framework(alone(), lambda: nn.Sequential(CountsPasses())), samples()
    framework.dry_call(batch, [batch])
    assert framework.model[0].passes == 0
    train(framework, 1)
    names = [tensor.name for tensor in framework.state()]
    assert framework.facts.undeclared == ("model: 0.passes",)
    assert [name for name in names if name.startswith("rng/held/model")]
