"""Whatever a model's ``state_dict`` says, what is trained is saved; what a resumed run could not load is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from hpctrain.backends.torch.state.tensors import added_keys
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.checkpoint.store import CheckpointStore, compare_model, open_saver
from hpctrain.cli import main
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.train.stateful import value_of
from tests.tasks.torch_tasks import global_batches, make_framework, plain_model, train


def saved(framework: TorchFramework) -> dict[str, np.ndarray]:
    return {tensor.name: value_of(tensor) for tensor in framework.state()}


class Wrapper(nn.Module):
    """Its ``state_dict`` is that of the model inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain_model()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        return outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.net.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.net.load_state_dict(*args, **kwargs)


class InHalf(Wrapper):
    """Publishes its weights in half precision."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.half() for name, value in super().state_dict(*args, **kwargs).items()}


def holding_a_wrapper() -> nn.Module:
    return nn.Sequential(Wrapper(), nn.Linear(3, 3))


def with_a_hook() -> nn.Module:
    """A hook drops the weights, as of a part that is thought to be frozen."""
    model = Wrapper()
    model.net.register_state_dict_post_hook(drop_weights)
    return model


def drop_weights(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.endswith("weight")]:
        del state[name]


@pytest.mark.parametrize("model", [Wrapper, InHalf, holding_a_wrapper, with_a_hook])
def test_what_state_dict_leaves_out_renames_or_rounds_is_saved(model):
    first = make_framework(alone(), model)
    train(first, 3)
    arrays = saved(first)
    assert {f"model/{name}" for name, _ in first.model.named_parameters()} <= arrays.keys()
    second = make_framework(alone(), model)
    second.load(arrays)
    assert second.weights_hash() == first.weights_hash()
    assert train(second, 3) == train(first, 3)


def exported(framework: TorchFramework, folder: Path) -> dict[str, Any]:
    saver = open_saver(CheckpointStore(folder))
    saver.begin(framework.state(), 1, {"other_names": framework.facts.other_names}, framework.host.synchronize)
    saver.finish().path_or_raise()
    saver.close()
    assert main(["ckpt", "export", str(folder), "-o", str(folder / "out.pt")]) == 0
    state: dict[str, Any] = torch.load(folder / "out.pt", weights_only=True)
    return state


class Detached(Wrapper):
    """Publishes its weights without their graph, and under names of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"layers/{name}": one.detach() for name, one in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        plain = {name.removeprefix("layers/"): one for name, one in state.items()}
        return super().load_state_dict(plain, *args, **kwargs)


@pytest.mark.parametrize("model", [Wrapper, Detached])
def test_the_export_of_a_model_that_renames_is_what_its_load_state_dict_takes(model, tmp_path):
    framework = make_framework(alone(), model)
    train(framework, 2)
    other = model()
    other.load_state_dict(exported(framework, tmp_path))
    assert all(map(torch.equal, other.parameters(), framework.model.parameters()))


class Counting(Wrapper):
    """Adds a count to its ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "calls": self.calls}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = state["calls"]
        return super().load_state_dict({name: one for name, one in state.items() if name != "calls"}, *args, **kwargs)


def test_what_an_override_adds_is_saved_and_exported(tmp_path):
    first = make_framework(alone(), Counting)
    train(first, 3)
    second = make_framework(alone(), Counting)
    second.load(saved(first))
    assert second.model.calls == first.model.calls == 3
    assert second.weights_hash() == first.weights_hash()
    assert exported(first, tmp_path)["calls"] == 3


class OneWay(Counting):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.load_state_dict(self, *args, **kwargs)


class Rounding(Counting):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: one.half() if isinstance(one, Tensor) else one for name, one in state.items()}


@pytest.mark.parametrize(("model", "why"), [(OneWay, "fails: .*Missing key"), (Rounding, "changes parameters")])
def test_what_an_override_adds_and_cannot_load_is_refused(model, why):
    with pytest.raises(UserError, match=f"(?s)state_dict of the model adds calls, and load_state_dict .* {why}"):
        make_framework(alone(), model)


class Changing(Wrapper):
    """Its first pass makes what the task should have made."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", None)
        self.register_buffer("mask", torch.zeros(2), persistent=how != "cache")

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "none":
            self.mean = x.mean(0)
        elif self.how == "new" and not hasattr(self, "scale"):
            self.register_buffer("scale", x.std())
        elif self.how in ("shape", "cache"):
            self.mask = torch.zeros(len(x))
        elif self.how == "replaced":
            self.net[0].weight = nn.Parameter(self.net[0].weight.detach())
        return super().forward(x)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("none", "mean of the model is new"),
        ("new", "scale of the model is new"),
        ("shape", r"mask of the model was torch.float32\[2\] and is torch.float32\[30\]"),
        ("replaced", "net.0.weight of the model is another parameter"),
    ],
)
def test_the_first_batch_shows_what_a_resumed_run_would_not_have(how, what):
    framework = make_framework(alone(), lambda: Changing(how))
    with pytest.raises(UserError, match=what):
        framework.dry_call(next(global_batches(1)))


def test_a_cache_that_is_not_saved_may_change():
    framework = make_framework(alone(), lambda: Changing("cache"))
    framework.dry_call(next(global_batches(1)))
    train(framework, 2)
    assert "model/mask" not in saved(framework)


class Sharing(Wrapper):
    """A buffer over the memory of a plain attribute."""

    radius: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        first = torch.ones(2)
        self.first = {"list": [first], "part": first[:1]}.get(how, first)
        self.register_buffer("radius", first.clone() if how == "copy" else first)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.radius += 1
        elif self.how == "attribute":
            self.first = self.radius.clone()
        else:
            self.radius = self.radius.view(2) if self.how == "view" else self.radius + 1
        return super().forward(x)


@pytest.mark.parametrize("how", ["attribute itself", "list", "part"])
def test_a_replaced_buffer_over_the_memory_of_an_attribute_is_refused(how):
    """A resumed run loaded it into both: 0.6301 instead of 3.119, with exit code 0."""
    framework = make_framework(alone(), lambda: Sharing(how))
    with pytest.raises(UserError, match="radius of the model shares memory with a plain attribute"):
        framework.dry_call(next(global_batches(1)))
    train(framework, 1)
    with pytest.raises(UserError, match="radius of the model shares memory with a plain attribute"):
        framework.state()


@pytest.mark.parametrize("how", ["copy", "in place", "view", "attribute"])
def test_what_a_resumed_run_would_share_alike_may_share_memory(how):
    first, second = (make_framework(alone(), lambda: Sharing(how)) for _ in range(2))
    first.dry_call(next(global_batches(1)))
    train(first, 2)
    second.load(saved(first))
    assert torch.equal(second.model.radius, first.model.radius)
    if how in ("in place", "view"):
        assert torch.equal(second.model.first, first.model.first)


def test_what_a_hook_prunes_or_adds_is_found_at_the_next_save():
    framework = make_framework(alone())
    train(framework, 1)
    framework.state()
    prune.l1_unstructured(framework.model[0], "weight", 0.5)
    with pytest.raises(UserError, match=r"0\.weight of the model is gone"):
        framework.state()


class Fewer(nn.Sequential):
    """The plain model, with a buffer or without."""

    def __init__(self, buffer: bool) -> None:
        super().__init__(*plain_model())
        if buffer:
            self.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize("had", [True, False])
def test_a_checkpoint_of_another_model_must_be_accepted(had, tmp_path):
    first, second = (make_framework(alone(), lambda has=has: Fewer(has)) for has in (had, not had))
    store = CheckpointStore(tmp_path)
    saver = open_saver(store)
    saver.begin(first.state(), 1, {})
    saver.finish().path_or_raise()
    saver.close()
    loaded = store.load()
    assert compare_model(first, loaded) == []
    where = "in the checkpoint and not in the model" if had else "in the model and not in the checkpoint"
    with pytest.raises(UserError, match=f"scale is {where}") as caught:
        compare_model(second, loaded)
    assert "--accept model" in caught.value.fix
    for accepted in ("model", "model.scale"):
        assert compare_model(second, loaded, accepted=[accepted]) == [f"scale is {where}, as accepted"]


def test_ranks_begin_with_equal_weights_though_state_dict_hides_them():
    from hpctrain.backends.torch.task import opening

    class Everyone:
        """Ranks of whose values the first has others."""

        comm = object()

        def allgather(self, value, what):
            return [value]

        def broadcast_array(self, array, what):
            array[...] = 0

    model = with_a_hook()
    opening.make_equal(model, Everyone())  # type: ignore[arg-type]
    assert not any(parameter.any() for parameter in model.parameters())


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


UNLIKE_MEMORY = {
    "the layout torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "the layout torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "is expanded": lambda: torch.ones(1).expand(4),
    "torch.inference_mode": in_inference_mode,
    "is a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("what", UNLIKE_MEMORY)
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_cannot_be_filled_in_place_is_refused_in_a_sentence(what, kind):
    def model():
        made = plain_model()
        value = UNLIKE_MEMORY[what]()
        if kind == "buffer":
            made.register_buffer("odd", value)
        else:
            made.odd = nn.Parameter(value, requires_grad=False)
        return made

    with pytest.raises(UserError, match=f"odd of the model .*{what}"):
        make_framework(alone(), model)


def test_a_model_is_asked_for_its_state_dict_only_if_something_may_add_to_it():
    """FSDP2 frees a rank's gathered layers when it is asked, and the other ranks would not gather them with it."""
    model, asked = plain_model(), list[str]()
    model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: asked.append(prefix))
    assert (added_keys(model), asked) == ({}, [])
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update(units="K"))
    assert (added_keys(model), asked) == ({"units": "K"}, [""])
    other = plain_model()
    usual = other.state_dict
    setattr(other, "state_dict", lambda: {**usual(), "units": "K"})  # noqa: B010
    assert added_keys(other) == {"units": "K"}
