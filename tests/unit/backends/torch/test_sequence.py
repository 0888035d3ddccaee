"""Blocks that compute in rows of a rank: exact, also with fewer rows than ranks could share, or refused by name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpctrain import UserError, columns, rows
from hpctrain.backends.torch.strategies.sequence import blocks_of, compute_in_rows
from hpctrain.backends.torch.strategies.tensor import cut_model, layers_to_cut
from hpctrain.backends.torch.strategies.tp_group import TPGroup
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
def test_gradients_are_those_of_the_whole_model(ranks: int, samples: int) -> None:
    """Of weights of norms and biases too, with rows that do not divide by the ranks, and of losses with gradients."""
    torch.manual_seed(1)
    whole = Gpt().double()
    for one in whole.parameters():
        nn.init.normal_(one, std=0.3)
    words = torch.randint(0, WORDS, (samples, LENGTH))
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        compare(whole, words, ranks)


def compare(whole: nn.Module, words: Tensor, ranks: int) -> None:
    """Check what ranks that compute in rows have against the whole model."""
    wanted = gradients(copy.deepcopy(whole), words)

    def on_a_rank(group: Group) -> None:
        own, tp_group = copy.deepcopy(whole), TPGroup(group)
        layers = layers_to_cut(own, LAYERS, ranks)
        cut = cut_model(own, layers, tp_group, Group("data"), [])
        compute_in_rows(blocks_of(own, layers), tp_group)
        for name, found in gradients(own, words).items():
            part = cut.slices.get(name)
            torch.testing.assert_close(found, part.of(wanted[name]) if part else wanted[name], rtol=0, atol=1e-12)

    in_threads(ranks, on_a_rank)


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


WORDS_OF: dict[str, Any] = {"*.up": columns, "*.down": rows}


@pytest.mark.parametrize(
    ("block", "words", "what"),
    [
        (LayerScale, WORDS_OF, "scale of a LayerScale works on rows"),
        (PostNorm, WORDS_OF | {"*.up": columns(gathers=True)}, "0.up of a PostNorm works on rows or gathers them"),
        (PostNorm, {"*.up": columns}, "no block of the model has layers split by columns and rows"),
    ],
)
def test_blocks_that_would_be_wrong_are_refused_by_name(block: Any, words: dict[str, Any], what: str) -> None:
    model = nn.Sequential(block(), block())
    with pytest.raises(UserError, match=re.escape(what)):
        blocks_of(model, layers_to_cut(model, words, 2))


def test_split_layers_without_a_norm_before_them_are_refused_when_called() -> None:
    def on_a_rank(group: Group) -> None:
        model, tp_group = nn.Sequential(PostNorm(), PostNorm()), TPGroup(group)
        layers = layers_to_cut(model, WORDS_OF, 2)
        cut_model(model, layers, tp_group, Group("data"), [])
        compute_in_rows(blocks_of(model, layers), tp_group)
        with pytest.raises(UserError, match=re.escape("0.up gets rows that no norm has gathered")):
            model(torch.ones(2, 3, 8))

    in_threads(2, on_a_rank)
