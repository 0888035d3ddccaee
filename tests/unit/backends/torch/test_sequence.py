"""Blocks that compute in rows of a rank: exact, also with fewer rows than ranks could share, or refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpctrain import UserError, columns, rows
from hpctrain.backends.torch.strategies.partition import Partition
from hpctrain.backends.torch.strategies.sequence import blocks_of, compute_in_rows
from hpctrain.backends.torch.strategies.split_values import SplitValues
from hpctrain.backends.torch.strategies.tensor import cut_model, layers_to_cut
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.backends.torch.task.recompute import recompute
from hpctrain.comm.group import Group
from tests.support.thread_groups import in_threads
from tests.tasks.tensor_tasks import LAYERS, LENGTH, WORDS, Gpt


def gradients(model: nn.Module, words: Tensor) -> dict[str, Tensor]:
    """Outputs, gradients of a loss that holds gradients, and gradients of another one, by name."""
    outputs = model(words)
    whole = [one for name, one in model.named_parameters() if "norm" in name]
    slopes = torch.autograd.grad(outputs.square().mean(), whole, create_graph=True)
    (outputs.sin().sum() + sum(slope.square().sum() for slope in slopes)).backward()
    return {"outputs": outputs.detach()} | {
        name: one.grad for name, one in model.named_parameters() if one.grad is not None
    }


@pytest.mark.parametrize(("ranks", "samples"), [(2, 2), (2, 3), (4, 1)])
def test_gradients_are_those_of_the_whole_model(ranks, samples):
    """Of weights of norms and biases too, with rows that do not divide by the ranks, and of losses with gradients."""
    torch.manual_seed(1)
    whole = Gpt().double()
    for one in whole.parameters():
        nn.init.normal_(one, std=0.3)
    words = torch.randint(0, WORDS, (samples, LENGTH))
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        compare(whole, words, ranks)


def in_rows(model: nn.Module, words: dict[str, Any], tp_group: TPGroup) -> Partition:
    """Split a model, and let it compute in rows."""
    layers = layers_to_cut(model, words, tp_group.group.size)
    cut = cut_model(model, layers, tp_group, Group("data"), [])
    compute_in_rows(blocks_of(model, layers), tp_group)
    return cut


def compare(
    whole: nn.Module,
    values: Any,
    ranks: int,
    words: dict[str, Any] = LAYERS,
    of: Any = gradients,
    recomputed: Sequence[str] = (),
) -> None:
    """Check what ranks that compute in rows, and recompute some layers, have against the whole model."""
    wanted = of(copy.deepcopy(whole), values)

    def on_a_rank(group: Group) -> None:
        own, tp_group = copy.deepcopy(whole), TPGroup(group)
        for one in own.modules():
            if isinstance(one, Drop):
                one.rank = group.rank
        cut = in_rows(own, words, tp_group)
        recompute(own, recomputed)
        for name, found in of(own, values).items():
            part = cut.slices.get(name)
            torch.testing.assert_close(found, part.of(wanted[name]) if part else wanted[name], rtol=0, atol=1e-12)

    in_threads(ranks, on_a_rank)


class Drop(nn.Module):
    """Dropout of its own random numbers: threads share torch's."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.drop = 0.5
        self.differs: list[bool] = []
        """For each call, whether ranks drew different numbers."""

    def forward(self, x: Tensor) -> Tensor:
        self.differs.append(isinstance(x, SplitValues))
        generator = torch.Generator().manual_seed(1 + self.rank if self.differs[-1] else 0)
        return x * torch.rand(x.shape, generator=generator, dtype=x.dtype).round()


class Feed(nn.Module):
    """A block with dropout of some kinds of values: before or after split layers, gathered, or in split layers."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.kinds = nn.ModuleDict({kind: Drop() for kind in kinds})

    def forward(self, x: Tensor) -> Tensor:
        def seen(kind: str, values: Tensor) -> Tensor:
            return self.kinds[kind](values) if kind in self.kinds else values

        inner = self.up(seen("gathered", self.norm(seen("before", x))))
        return x + seen("after", self.down(seen("inner", inner)))


def plain_gradients(model: nn.Module, calls: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of one loss of several calls of the model."""
    sum(model(one).sin().sum() for one in calls).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("recomputed", [[], ["*"], ["*.norm", "*.up", "*.kinds.*"]])
def test_gradients_of_dropout_of_gathered_values(recomputed):
    whole = nn.Sequential(Feed("gathered"), Feed("gathered")).double()
    compare(whole, [torch.randn(2, 3, 8).double()], 2, WORDS_OF, plain_gradients, recomputed)


def test_dropout_differs_between_ranks_where_their_values_do():
    kinds = {"before": True, "gathered": False, "inner": True, "after": True}

    def on_a_rank(group):
        model, tp_group = nn.Sequential(Feed(*kinds), Feed(*kinds)), TPGroup(group)
        drops = {name: one for name, one in model.named_modules() if isinstance(one, Drop)}
        in_rows(model, WORDS_OF, tp_group)
        model(torch.ones(2, 3, 8))
        assert {name: one.differs for name, one in drops.items()} == {
            name: [kinds[name.rpartition(".")[2]]] for name in drops
        }

    in_threads(2, on_a_rank)


@pytest.mark.parametrize("recomputed", [[], ["*"]])
@pytest.mark.parametrize("shapes", [[(2, 3, 8), (1, 4, 8)], [(2, 6, 8), (6, 2, 8)]])
def test_calls_of_several_lengths_in_one_loss(shapes, recomputed):
    calls = [torch.randn(shape).double() for shape in shapes]
    compare(nn.Sequential(Feed(), Mixed(), Feed()).double(), calls, 2, WORDS_OF, plain_gradients, recomputed)


class Mixed(Feed):
    """A block whose split layers depend on which rows are of one sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).cumsum(1).sin())


class LayerScale(nn.Module):
    """A block with a replicated parameter that works on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))


class PostNorm(nn.Module):
    """A block whose split layers get what no norm has gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x)))


class RunningNorm(nn.Module):
    """A norm by statistics of all rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))


class DropPath(nn.Module):
    """Drops samples."""


def with_module(name: str, module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """What makes a block with one module more."""

    def made() -> nn.Module:
        block = Feed()
        block.add_module(name, module())
        return block

    return made


WORDS_OF: dict[str, Any] = {"*.up": columns, "*.down": rows}


@pytest.mark.parametrize(
    ("block", "words", "what"),
    [
        (LayerScale, WORDS_OF, "scale of a LayerScale works on rows"),
        (with_module("drop", DropPath), WORDS_OF, "drop of a Feed works on rows"),
        (with_module("drop", nn.Dropout1d), WORDS_OF, "drop of a Feed works on rows"),
        (with_module("running", lambda: RunningNorm(8)), WORDS_OF, "running of a Feed works on rows"),
        (with_module("q_norm", lambda: nn.RMSNorm(4)), WORDS_OF, "q_norm.weight of a Feed works on rows"),
        (PostNorm, WORDS_OF | {"*.up": columns(gathers=True)}, "0.up of a PostNorm works on rows or gathers them"),
        (PostNorm, {"*.up": columns}, "no block of the model has layers split by columns and rows"),
    ],
)
def test_blocks_that_would_be_wrong_are_refused_by_name(block, words, what):
    model = nn.Sequential(block(), block())
    with pytest.raises(UserError, match=re.escape(what)):
        blocks_of(model, layers_to_cut(model, words, 2))


@pytest.mark.parametrize(
    ("between", "name"), [(nn.Linear(8, 8), "1"), (Feed(), "1.norm"), (nn.Sequential(nn.ReLU()), "1.0")]
)
def test_a_module_between_blocks_that_is_in_none_is_refused_by_name(between, name):
    """Such as a block that the task leaves whole: it would take a rank's rows for the activations of all."""
    model = nn.Sequential(Feed(), between, nn.Identity(), Feed())
    words = {f"{number}.{layer}": word for number in (0, 3) for layer, word in (("up", columns), ("down", rows))}
    with pytest.raises(UserError, match=rf"true, and {re.escape(name)}, between blocks with split layers, is in none"):
        blocks_of(model, layers_to_cut(model, words, 2))
    model[1] = nn.Identity()
    assert len(blocks_of(model, layers_to_cut(model, words, 2))) == 2


def test_a_block_that_returns_what_a_norm_has_gathered_is_refused_when_called():
    """Also where the shapes of rows and of whole activations can be added."""

    def on_a_rank(group):
        model, tp_group = nn.Sequential(Sandwich(), Sandwich()), TPGroup(group)
        in_rows(model, WORDS_OF, tp_group)
        with pytest.raises(UserError, match="a Sandwich returns whole activations, which a norm gathers"):
            model(torch.ones(2, 3, 8))

    in_threads(2, on_a_rank)


class Sandwich(Feed):
    """A block with a norm after split layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(self.up(self.norm(x))))


def test_split_layers_without_a_norm_before_them_are_refused_when_called():
    def on_a_rank(group):
        model = nn.Sequential(PostNorm(), PostNorm())
        in_rows(model, WORDS_OF, TPGroup(group))
        with pytest.raises(UserError, match=re.escape("0.up gets rows that no norm has gathered")):
            model(torch.ones(2, 3, 8))

    in_threads(2, on_a_rank)


class Adapted(nn.Module):
    """A layer with an adapter, named as PEFT names them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base_layer.out_features)})

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize(("ranks", "samples"), [(2, 3), (4, 1)])
def test_adapters_compute_in_rows_with_their_layers(ranks, samples):
    torch.manual_seed(1)
    whole = Gpt()
    words = LAYERS.copy()
    for block in whole.blocks:
        for name, split in (("qkv", "lora_B"), ("out", "lora_A"), ("up", "lora_B"), ("down", "lora_A")):
            block.register_module(name, Adapted(block.get_submodule(name)))
            word = words.pop(f"blocks.*.{name}", None) or words[f"blocks.*.{name}.base_layer"]
            words |= {f"blocks.*.{name}.{one}": word for one in ("base_layer", f"{split}.default")}
    for one in whole.double().parameters():
        nn.init.normal_(one, std=0.3)
    with sdpa_kernel(SDPBackend.MATH):
        compare(whole, torch.randint(0, WORDS, (samples, LENGTH)), ranks, words)
