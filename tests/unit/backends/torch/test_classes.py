"""Cross-entropy of classes that are cut over ranks: that of torch, with its gradients, and of nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain import UserError, columns, cross_entropy
from hpctrain.backends.torch.strategies.tensor import cut_model, layers_to_cut
from hpctrain.backends.torch.strategies.tp_group import CutLogits, TPGroup
from hpctrain.comm.group import Group
from tests.support.thread_groups import in_threads

CLASSES, WIDTH = 12, 6
LAYER = {"0": columns(classes=True)}


def model() -> nn.Sequential:
    """Logits large enough to overflow where the largest is not taken away first."""
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, CLASSES).double()
    nn.init.constant_(head.bias, 1000.0)
    return nn.Sequential(head)


def inputs() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(4)
    values = torch.randn(3, 5, WIDTH, generator=random, dtype=torch.float64)
    targets = torch.randint(CLASSES, (3, 5), generator=random)
    targets[1, 2:4] = -100
    return values, targets


def gradients(head: nn.Module, **options: Any) -> list[Tensor]:
    """The loss, and its gradients by inputs and weights."""
    values, targets = inputs()
    values.requires_grad_()
    loss = cross_entropy(head(values), targets, **options)
    loss.backward()
    found = [loss.detach(), values.grad, *(one.grad for one in head.parameters())]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.3},
    {"ignore_index": 4},
    {"ignore_index": 11, "label_smoothing": 0.1, "reduction": "sum"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_loss_of_some_classes_each_is_that_of_all(ranks, options):
    whole = model()
    values, targets = inputs()
    if "ignore_index" in options:
        targets[targets == -100] = options["ignore_index"]
    wanted = gradients(whole) if not options else None
    plain = model()
    values.requires_grad_()
    loss = functional.cross_entropy(plain(values).flatten(0, 1), targets.flatten(), **options)
    loss.backward()
    expected = [loss.detach(), values.grad, *(one.grad for one in plain.parameters())]
    if wanted is not None:
        assert all(torch.equal(one, other) for one, other in zip(wanted, expected, strict=True) if other is not None)

    def on_a_rank(group):
        own = copy.deepcopy(whole)
        own.zero_grad()
        cut = cut_model(own, layers_to_cut(own, LAYER, ranks), TPGroup(group), Group("data"), [])
        mine = values.detach().clone().requires_grad_()
        found = cross_entropy(own(mine), targets, **options)
        found.backward()
        have = [found.detach(), mine.grad, *(one.grad for one in own.parameters())]
        parts = [None, None, cut.slices["0.weight"], cut.slices["0.bias"]]
        return [
            float((one - (part.of(other) if part else other)).abs().max())
            for one, other, part in zip(have, expected, parts, strict=True)
            if one is not None and other is not None
        ]

    for differences in in_threads(ranks, on_a_rank):
        assert len(differences) == 4
        assert max(differences) < 1e-12


def penalised(head: nn.Module) -> Tensor:
    """A loss that holds a gradient of the cross-entropy; gives its gradient by the weight."""
    values, targets = inputs()
    values.requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(head(values), targets), values, create_graph=True)
    slope.square().sum().backward()
    (weight, _) = head.parameters()
    assert weight.grad is not None
    return weight.grad


def test_gradients_of_gradients():
    wanted, whole = penalised(model()), model()

    def on_a_rank(group):
        own = copy.deepcopy(whole)
        cut = cut_model(own, layers_to_cut(own, LAYER, 2), TPGroup(group), Group("data"), [])
        return float((penalised(own) - cut.slices["0.weight"].of(wanted)).abs().max())

    assert wanted.abs().max() > 1e-6
    assert max(in_threads(2, on_a_rank)) < 1e-12


def test_metrics_get_all_classes():
    """And so do predictions: a layer that is not training gathers."""
    values, targets = inputs()
    whole = model()
    wanted = whole(values)

    def on_a_rank(group):
        own = copy.deepcopy(whole)
        cut_model(own, layers_to_cut(own, LAYER, 2), TPGroup(group), Group("data"), [])
        own.eval()
        with torch.no_grad():
            return own(values)

    for outputs in in_threads(2, on_a_rank):
        # Not their bits: some processors' matrix products add up in another order where a matrix is narrower.
        torch.testing.assert_close(outputs, wanted, rtol=1e-12, atol=0)
        of_rank, of_all = cross_entropy(outputs, targets), cross_entropy(wanted, targets)
        torch.testing.assert_close(of_rank, of_all, rtol=1e-12, atol=0)


def some() -> CutLogits:
    group = Group("two")
    group.size = 2
    return CutLogits(torch.zeros(2, 3, 4), TPGroup(group), "head")


def test_16_bits_are_summed_in_32():
    found = cross_entropy(torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))
    assert found.dtype == torch.bfloat16, "as torch has it, whose autocast makes it float32"

    def on_a_rank(group):
        outputs = CutLogits(torch.zeros(2, 4, dtype=torch.bfloat16), TPGroup(group), "head")
        return cross_entropy(outputs, torch.zeros(2, dtype=torch.int64)).dtype

    assert in_threads(2, on_a_rank) == [torch.float32] * 2


@pytest.mark.parametrize(
    "uses",
    [
        lambda it: functional.cross_entropy(it, torch.zeros(2, dtype=torch.int64)),
        lambda it: it.flatten(0, 1),
        lambda it: it.argmax(-1),
        lambda it: it[..., 0],
        lambda it: it[:, :, :2],
        lambda it: torch.softmax(it, -1),
    ],
)
def test_what_would_take_a_part_for_the_whole_is_refused(uses):
    with pytest.raises(UserError, match="got the outputs of head, of which each rank has only some classes"):
        uses(some())


def test_ranges_of_the_other_axes():
    assert some()[:, :-1].shape == (2, 2, 8)
    assert some()[1:].shape == (1, 3, 8)


@pytest.mark.parametrize("target", [8, -1])
def test_targets_that_are_no_class(target):
    targets = torch.full((2, 3), target)
    with pytest.raises(IndexError):
        cross_entropy(some(), targets)
    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(2, 3, 8), targets)


def test_shapes_that_do_not_fit():
    with pytest.raises(UserError, match=r"outputs \[2, 3, 8\] and targets \[2, 8\]"):
        cross_entropy(some(), torch.zeros(2, 8, dtype=torch.int64))


def test_a_reduction_that_there_is_not():
    reduction: Any = "none"
    for outputs in (some(), torch.zeros(2, 3, 8)):
        with pytest.raises(UserError, match="the reduction 'none'"):
            cross_entropy(outputs, torch.zeros(2, 3, dtype=torch.int64), reduction=reduction)


@pytest.mark.parametrize("options", [{"parts": 2, "classes": True}, {"gathers": True, "classes": True}])
def test_words_that_contradict_themselves(options):
    with pytest.raises(UserError, match="contradicts itself"):
        columns(**options)
