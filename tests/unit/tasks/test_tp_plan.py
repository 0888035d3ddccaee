"""Plans of Hugging Face's models."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hpctrain.tasks.definition import columns, rows, vocabulary  # noqa: E402
from hpctrain.tasks.tp_plan import cuts_of  # noqa: E402

pytestmark = pytest.mark.slow
PLAN = {"model.layers.*.up": "colwise", "model.layers.*.down": "rowwise", "lm_head": "colwise_gather_output"}


class Base(nn.Module):
    """Has a plan of its own, which the model around it has included."""

    def __init__(self) -> None:
        super().__init__()
        self._tp_plan = {"layers.*.up": "colwise"}
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})])


class Network(nn.Module):
    """A network, maybe with a head that is tied to the embedding."""

    def __init__(self, is_tied: bool = False, **styles: str) -> None:
        super().__init__()
        self.model, self.lm_head = Base(), nn.Linear(4, 8, bias=False)
        self._tp_plan = PLAN | {name.replace("__", "."): style for name, style in styles.items()}
        if is_tied:
            self.lm_head.weight = self.model.embed.weight


def test_styles_have_counterparts():
    cuts = {"model.layers.*.up": columns, "model.layers.*.down": rows}
    assert cuts_of(Network()) == cuts | {"lm_head": columns(gathers=True)}
    assert cuts_of(Network(model__embed="embedding_rowwise"))["model.embed"] == vocabulary
    assert cuts_of(Network(is_tied=True)) == cuts, "the embedding stays whole, and so the head"
    assert set(cuts_of(nn.ModuleDict({"wrapped": Network()}))) == {f"wrapped.{name}" for name in PLAN}


class Adapted(nn.Module):
    """A layer of PEFT, which the model around it may have instead of some layers."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": nn.Linear(4, 8)}) for _ in "AB")


class Forwarding(nn.Module):
    """Has what its model has, as PEFT's model does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)


def test_adapters_are_split_with_their_layers():
    model = Network()
    layer = model.model.layers[0]
    layer["up"], layer["down"] = Adapted(layer["up"]), Adapted(layer["down"])
    start = "inner.model.layers.0"
    assert cuts_of(Forwarding(model)) == {
        f"{start}.up.base_layer": columns,
        f"{start}.up.lora_B.default": columns,
        f"{start}.down.base_layer": rows,
        f"{start}.down.lora_A.default": rows,
        "inner.lm_head": columns(gathers=True),
    }


def test_models_without_a_plan_or_with_an_unknown_style_say_nothing():
    assert cuts_of(nn.Linear(2, 2)) == {}
    assert cuts_of({"a": nn.Linear(2, 2)}) == {}
    assert cuts_of(Network(lm_head="replicated_with_grad_allreduce")) == {}
