"""Which layers stages get, in which order they pass micro-batches, and what cannot be shared out."""

from __future__ import annotations

import copy
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpctrain.backends.torch.strategies.exchange import host_bytes
from hpctrain.backends.torch.strategies.pipeline import pipeline_strategy
from hpctrain.backends.torch.strategies.pipeline.stage import described, described_tensors, rebuilt
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import (
    Act,
    Pass,
    StageChoice,
    acts,
    balanced,
    bubble,
    ends,
    most_held,
    one_forward_one_backward,
    source,
)
from hpctrain.backends.torch.strategies.pipeline.stages import (
    as_before,
    is_chain,
    keep_stages,
    layers_of,
    staged,
    tied_parameters,
)
from hpctrain.config.features import Feature
from hpctrain.errors import UserError
from tests.tasks.pipeline_tasks import Gpt, layers


def told(rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> str:
    order = one_forward_one_backward(rank, ranks, micro_batches, chunks)
    return " ".join(f"{'fgh'[each.chunk] if each.forward else 'bcd'[each.chunk]}{each.micro_batch}" for each in order)


def test_ranks_take_turns():
    assert told(0, 3, 4) == "f0 f1 f2 b0 f3 b1 b2 b3"
    assert told(1, 3, 4) == "f0 f1 b0 f2 b1 f3 b2 b3"
    assert told(2, 3, 4) == "f0 b0 f1 b1 f2 b2 f3 b3"
    assert told(0, 4, 2) == "f0 f1 b0 b1"
    assert told(0, 3, 0) == ""


def test_chunks_take_turns():
    """As in figure 4 of Megatron-LM's paper."""
    assert told(1, 2, 4, 2) == "f0 f1 g0 c0 g1 c1 f2 b0 f3 b1 g2 c2 g3 c3 b2 b3"
    assert told(0, 2, 4, 2) == "f0 f1 g0 g1 f2 c0 f3 c1 g2 b0 g3 b1 c2 c3 b2 b3"


SIZES = st.tuples(st.integers(2, 8), st.integers(0, 17), st.integers(1, 4))
"""Ranks, micro-batches, chunks."""


@given(SIZES)
def test_ranks_wait_as_long_as_computed(sizes):
    """Each pass finds what it needs, and the first rank holds most activations."""
    ranks, micro_batches, chunks = sizes
    found = ends(*sizes)
    assert [list(own) for own in found] == [one_forward_one_backward(rank, *sizes) for rank in range(ranks)]
    for rank, own in enumerate(found):
        assert len(own) == 2 * micro_batches * chunks
        for each, end in own.items():
            stage = each.chunk * ranks + rank
            needed = [stage - 1] if each.forward else [stage + 1, stage]
            for other in needed:
                if other in range(ranks * chunks):
                    before = Pass(each.micro_batch, each.forward or other == stage, other // ranks)
                    assert found[other % ranks][before] < end
    if micro_batches:
        length = max(max(own.values()) for own in found)
        assert bubble(*sizes) == pytest.approx(1 - 2 * micro_batches * chunks / length)
        held = [max(itertools.accumulate(1 if each.forward else -1 for each in own)) for own in found]
        assert max(held) == held[0] == most_held(*sizes)
        assert chunks > 1 or all(most <= ranks - rank for rank, most in enumerate(held))


@given(SIZES)
def test_no_two_ranks_wait_for_each_other_if_messages_wait_for_their_turn(sizes):
    """Each rank handles one message at a time, in both directions, which ends when both sides have come to it."""
    ranks, micro_batches, chunks = sizes
    left = []
    for rank in range(ranks):
        own = []
        for act, each in acts(rank, *sizes, True):
            if act is Act.RECEIVE:
                other, before = source(rank, each, ranks, chunks) or (rank, each)
                own.append((other, rank, before))
            stage = each.chunk * ranks + rank + (1 if each.forward else -1)
            if act is Act.SEND and stage in range(ranks * chunks):
                own.append((rank, stage % ranks, each))
        left.append(own)
    count = sum(map(len, left))
    assert count == 4 * micro_batches * (ranks * chunks - 1)
    while count:
        heads = [own[0] for own in left if own]
        able = next(one for one in heads if heads.count(one) == 2)
        left = [own[1:] if own and own[0] == able else own for own in left]
        count -= 2


@given(SIZES, st.booleans())
def test_acts_are_those_of_the_passes_in_order(sizes, in_order):
    ranks, _, chunks = sizes
    for rank in range(ranks):
        order, found = one_forward_one_backward(rank, *sizes), acts(rank, *sizes, in_order)
        assert [each for act, each in found if act is Act.COMPUTE] == order
        assert [each for act, each in found if act is Act.SEND] == order
        for each in order:
            wanted = [Act.RECEIVE] * (source(rank, each, ranks, chunks) is not None) + [Act.COMPUTE, Act.SEND]
            assert [act for act, other in found if other == each] == wanted


def test_how_long_stages_wait():
    assert bubble(4, 1) == 0.75
    assert bubble(2, 4) == 0.2
    assert bubble(1, 4) == 0
    assert bubble(4, 4, 2) == 3 / 11


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 3)), min_size=1, max_size=7), st.integers(1, 4)
)
def test_the_most_expensive_stage_is_as_cheap_as_can_be(given_layers, stages):
    """Each stage has a layer that is trained, and none begins with one that is joined to the one before."""
    costs, trained = [cost for cost, _, _ in given_layers], [one for _, one, _ in given_layers]
    joined = [one == 0 for _, _, one in given_layers]
    found = balanced(costs, trained, stages, joined)
    every = [
        [range(begin, end) for begin, end in itertools.pairwise((0, *cuts, len(costs)))]
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    ]
    able = [ranges for ranges in every if all(any(trained[number] for number in own) for own in ranges)]
    able = [ranges for ranges in able if not any(joined[own.start] for own in ranges[1:])]
    assert (found is None) == (not able)
    if found is not None:
        assert found in able
        assert worst(costs, found) == min(worst(costs, ranges) for ranges in able)


def test_layers_that_cost_nothing_stay_with_the_ones_before_and_first_stages_are_short():
    """They hold the activations of more micro-batches."""
    assert balanced([1, 0, 1], [True, False, True], 2) == [range(2), range(2, 3)]
    assert balanced([1] * 5, [True] * 5, 2) == [range(2), range(2, 5)]


def worst(costs: list[int], ranges: list[range]) -> int:
    """Cost of the most expensive stage."""
    return max(sum(costs[number] for number in own) for own in ranges)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        (torch.ones(2), None, [True, {"a": 1.5, 2: torch.zeros(0, dtype=torch.int64)}]),
        {},
        [torch.tensor(3, dtype=torch.bfloat16, requires_grad=False), "text"],
    ],
)
def test_what_is_handed_on_comes_back_as_it_was(value):
    tensors: list[torch.Tensor] = []
    structure = described(value, tensors)
    assert [(dtype, shape) for dtype, shape, _ in described_tensors(structure)] == [
        (str(one.dtype), list(one.shape)) for one in tensors
    ]
    assert repr(rebuilt(structure, tensors)) == repr(value)


def test_a_tensor_that_is_handed_on_twice_stays_one():
    one, other = torch.ones(2), torch.zeros(3)
    tensors: list[torch.Tensor] = []
    structure = described((one, {"skip": [other, one]}, other), tensors)
    assert [id(tensor) for tensor in tensors] == [id(one), id(other)]
    assert len(list(described_tensors(structure))) == 2
    first, inner, last = rebuilt(structure, tensors)
    assert first is inner["skip"][1] is one
    assert last is inner["skip"][0] is other


@pytest.mark.parametrize("lazy", [torch.conj, lambda values: values[:1].conj().imag])
def test_conjugates_travel_as_their_values(lazy):
    """Their signs are changed when they are read: torch does it no sooner."""
    values = lazy(torch.tensor([1 + 2j, 3 - 1j]))
    assert torch.equal(torch.from_numpy(host_bytes(values)).view(values.dtype), values)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "passes on a set"),
        (torch.ones(2).to_sparse(), "passes on a tensor of torch.sparse_coo"),
        ({(1, 2): 3}, "passes on a dict"),
    ],
)
def test_what_cannot_be_handed_on(value, said):
    with pytest.raises(UserError, match=said):
        described(value, [])


def test_a_stage_keeps_its_own_in_place():
    """Parameters, the optimizer's groups with their labels, and its state."""
    model = Gpt()
    wholes = dict(model.named_parameters())
    matrices = [(name, one) for name, one in wholes.items() if one.ndim > 1]
    vectors = [(name, one) for name, one in wholes.items() if one.ndim == 1]
    optimizer = torch.optim.Adagrad([{"params": matrices}, {"params": vectors, "lr": 0.5}])
    stages = staged(model, layers_of(model, layers), 3)
    gone = keep_stages(model, stages, 1, [optimizer])
    own = dict(model.named_parameters())
    assert {name.split(".")[1] for name in own} == {str(number - 1) for number in stages.ranges[1]}
    assert all(own[name] is wholes[name] for name in own)
    assert {id(one) for one in gone} == {id(one) for name, one in wholes.items() if name not in own}
    assert all(one.numel() == 0 for one in gone)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        [name for name, one in own.items() if one.ndim > 1],
        [name for name, one in own.items() if one.ndim == 1],
    ]
    assert set(optimizer.state) == set(own.values())
    optimizer.step()


def two(one: nn.Module, other: nn.Module, **more: nn.Module) -> nn.Module:
    """A model of two layers."""
    model = nn.Module()
    for name, module in {"one": one, "other": other, **more}.items():
        setattr(model, name, module)
    return model


class Table(nn.Module):
    """Rotations, or the like."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("values", torch.ones(3), persistent=persistent)


def tied() -> nn.Module:
    model = two(nn.Linear(3, 3), nn.Linear(3, 3))
    model.other.weight = model.one.weight  # type: ignore[union-attr]
    return model


def with_table(persistent: bool) -> nn.Module:
    table = Table(persistent)
    return two(nn.Sequential(nn.Linear(3, 3), table), nn.Sequential(nn.Linear(3, 3), table))


def of(model: nn.Module, chain: Any, stages: int = 2) -> Any:
    return staged(model, layers_of(model, chain), stages)


@pytest.mark.parametrize(
    ("model", "chain", "said"),
    [
        (with_table(True), lambda m: [m.one, m.other], "^one.1.values, a buffer, is used by layers in stages 0 and 1"),
        (two(nn.Linear(3, 3), nn.Linear(3, 3)), lambda m: [m.one, torch.relu], "^other.weight of the model is in none"),
        (
            two(nn.Linear(3, 3), nn.Linear(3, 3)),
            lambda m: [m.one, lambda x: m.other(x) + 1],
            "^layer 1 of layers= .* whole",
        ),
        (two(nn.Linear(3, 3), Table(True)), lambda m: [m.one, m.one], "^other.values of the model is in none"),
        (two(nn.Linear(3, 3), nn.ReLU()), lambda m: [m.one, m.other], "pipeline is 2, and the model has 1 layer with"),
        (two(nn.Linear(3, 3), nn.ReLU()), lambda m: m.one, "does not return a list of layers"),
        (two(nn.Linear(3, 3), nn.ReLU()), lambda m: [], "does not return a list of layers"),
        (
            two(nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)])),
            lambda m: [m.one, m.other],
            "^layer 1 of layers= .* is a ModuleList, which holds layers and cannot be called",
        ),
    ],
)
def test_what_is_refused_by_name(model, chain, said):
    with pytest.raises(UserError, match=said):
        of(model, chain)


def test_stages_have_copies_of_tied_parameters_only_where_they_must():
    """Also of frozen ones."""
    model = tied()
    both = of(model, lambda m: [m.one, m.other])
    assert both.ranges == [range(1), range(1, 2)]
    assert tied_parameters(model, both) == {"one.weight": [0, 1]}
    model.third = nn.Linear(3, 3)
    apart = of(model, lambda m: [m.one, m.other, m.third])
    assert apart.ranges == [range(2), range(2, 3)] and not tied_parameters(model, apart)
    model.one.weight.requires_grad_(False)  # type: ignore[union-attr]
    again = of(model, lambda m: [m.third, m.one, m.other], 3)
    assert tied_parameters(model, again) == {"one.weight": [1, 2]}


def test_stages_of_a_rank_share_parameters_without_copies():
    model: Any = two(nn.Linear(3, 3), nn.Linear(3, 3), third=nn.Linear(3, 3), last=nn.Linear(3, 3))
    model.third.weight = model.one.weight
    stages = staged(model, layers_of(model, lambda m: [m.one, m.other, m.third, m.last]), ranks=2, chunks=2)
    assert not tied_parameters(model, stages)
    assert stages.shares(0) and not stages.shares(1)
    keep_stages(model, stages, 0, [])
    assert [name for name, _ in model.named_parameters()] == ["one.weight", "one.bias", "third.bias"]


@pytest.mark.parametrize(
    ("ranks", "chunks", "said"),
    [
        (2, 3, "^parallel.pipeline is 2 and parallel.pipeline_chunks 3, and the model has 3 layers"),
        (2, 1, "layers= of the task gives the layers of 3 stages, and parallel.pipeline is 2"),
        (3, 2, "layers= of the task gives the layers of 3 stages, and parallel.pipeline is 3 and .*chunks 2"),
    ],
)
def test_the_number_of_stages_is_named(ranks, chunks, said):
    model = three()
    chain = [model.one, model.other, model.third]
    lists = chain if (ranks, chunks) == (2, 3) else [[one] for one in chain]
    with pytest.raises(UserError, match=said):
        staged(model, layers_of(model, lambda m: lists), ranks, chunks)


def test_the_stages_of_an_earlier_attempt_have_no_copies_of_sharded_parameters():
    """Ranks would wait for rows of the copy that another rank has; the stages that were planned have no copies."""
    model: Any = tied()
    model.third = nn.Linear(3, 3)
    planned = of(model, lambda m: [m.one, m.other, m.third])
    parts = dict.fromkeys(("task", "world", "compute", "task_state", "partition"))
    choice = StageChoice(batch=lambda: {}, kept=(1, 2))
    opening: Any = SimpleNamespace(**parts, model=model, features={Feature.SHARD: True}, stage_choice=choice)
    with pytest.raises(UserError, match=r"several stages share one\.weight, and parallel\.shard is optimizer"):
        pipeline_strategy.divide(opening, planned, opening)


def test_a_buffer_that_layers_share_stays_in_one_stage_though_ends_are_tied():
    table = Table(True)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), table) for _ in range(2)), nn.Linear(3, 3))
    model[2].weight = model[0][0].weight  # type: ignore[union-attr]
    assert of(model, None).ranges == [range(2), range(2, 3)]


def three() -> nn.Module:
    return two(nn.Linear(3, 3), nn.Linear(3, 3), third=nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("chain", "said"),
    [
        (lambda m: [[m.one], [m.other], [m.third]], "gives the layers of 3 stages, and parallel.pipeline is 2"),
        (lambda m: [[m.one, m.other, m.third]], "gives the layers of 1 stage, and parallel.pipeline is 2"),
        (lambda m: [[m.one, m.other, m.third], []], "gives stage 1 no layers"),
        (lambda m: [[m.one, m.other, m.third], [torch.relu]], "stage 1, as layers= .* has no parameter to train"),
        (lambda m: [[m.one, m.other], m.third], "does not return a list of layers"),
    ],
)
def test_stages_that_a_task_gives_wrongly_are_refused(chain, said):
    with pytest.raises(UserError, match=said):
        of(three(), chain)


def test_stages_are_those_that_the_task_gives():
    """Whatever they cost."""
    model = three()
    layers = layers_of(model, lambda m: [(m.one,), [torch.relu, m.other, m.third]])
    stages = staged(model, layers, 2, costs=[0.0, 0.0, 0.0, 9.0])
    assert stages.are_given and stages.counts == [1, 3]


def test_stages_have_equal_costs_and_weights_of_their_own():
    """The only cut that leaves a shared weight in one stage is taken, however uneven."""
    model = three()
    layers = layers_of(model, lambda m: [m.one, m.other, m.third])
    assert staged(model, layers, 2, costs=[1.0, 1.0, 3.0]).counts == [2, 1]
    assert staged(model, layers, 2, costs=[3.0, 1.0, 1.0]).counts == [1, 2]
    model.other.weight = model.one.weight  # type: ignore[union-attr]
    layers = layers_of(model, lambda m: [m.one, m.other, m.third])
    assert staged(model, layers, 2, costs=[3.0, 1.0, 1.0]).counts == [2, 1]


@pytest.mark.parametrize(
    ("counts", "fits"),
    [
        ([1, 3], True),
        ([2, 2], False),
        ([3, 1], True),
        ([4, 0], False),
        ([1, 2], False),
        ([5, -1], False),
        ([], False),
        ([4], False),
        ([1, 2, 1], False),
    ],
)
def test_stages_of_an_earlier_attempt_are_kept_if_they_fit(counts, fits):
    """The second and the third layer share a buffer."""
    model = two(nn.Linear(3, 3), nn.Linear(3, 3), third=nn.Linear(3, 3), last=nn.Linear(3, 3))
    model.other.register_buffer("shift", torch.ones(3))  # type: ignore[union-attr]
    model.third.register_buffer("shift", model.other.shift)  # type: ignore[union-attr]
    layers = layers_of(model, lambda m: [m.one, m.other, m.third, m.last])
    found = as_before(model, staged(model, layers, 2), counts)
    assert (found is not None) == fits
    assert found is None or found.counts == counts


class Around(nn.Sequential):
    """Does more than its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def test_a_chain_does_nothing_but_call_its_layers():
    assert is_chain(nn.Sequential(nn.Linear(3, 3)))
    assert not is_chain(Around(nn.Linear(3, 3)))
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    assert not is_chain(hooked)
    assert not is_chain(two(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_functions_say_by_what_they_hold_which_parameters_are_theirs():
    model = two(nn.Linear(3, 3), nn.Linear(3, 3), third=nn.Linear(3, 3))
    one, other = model.one, model.other

    def chain(m):
        return [lambda x: one(x) + 1, functools.partial(lambda layer, x: layer(x), other), m.third.forward]

    assert [len(layer.held) for layer in layers_of(model, chain)] == [2, 2, 2]
    assert [list(own) for own in of(model, chain, 3).ranges] == [[0], [1], [2]]


class Language(nn.Module):
    """A model as many are written: parts in a dict, and steps between them as methods."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"words": nn.Embedding(5, 3), "places": nn.Embedding(4, 3), "block": nn.Linear(3, 3)}
        self.body = nn.ModuleDict(parts)
        self.head = nn.Linear(3, 5, bias=False)
        self.heads = [self.head]
        self.scale = nn.Parameter(torch.ones(3))
        self.times = 2.0

    @property
    def words(self) -> Any:
        return self.body.words

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.body.places(torch.arange(ids.shape[1])) * self.times

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def classes(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[0](self.scaled(x)) if self.training else self.classes(x)

    def by_name(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, "head")(x)  # noqa: B009

    def nested(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(lambda one: self.head(one) + 1)(one) for one in x])

    def all_of_them(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(one.sum() for one in self.parameters())

    def keeps(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return x

    @torch.no_grad()
    def wrapped(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_methods_of_the_model_use_what_they_read_of_it():
    """Also by another method or a property; and each stage computes with what it has kept."""
    model: Any = Language()
    ids = torch.tensor([[1, 2, 3]])
    wanted = model.classes(model.body.block(model.embed(ids)))
    layers = layers_of(model, lambda m: [m.embed, m.body.block, m.classes])
    names = {id(one): name for name, one in model.named_parameters()}
    assert [{names[one] for one in layer.held} for layer in layers] == [
        {"body.words.weight", "body.places.weight"},
        {"body.block.weight", "body.block.bias"},
        {"head.weight", "scale"},
    ]
    found: Any = ids
    for stage in range(3):
        own = copy.deepcopy(model)
        stages = of(own, lambda m: [m.embed, m.body.block, m.classes], 3)
        keep_stages(own, stages, stage, [])
        ((layer,),) = stages.of(stage)
        found = layer.call(found)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("method", ["by_name", "nested", "all_of_them", "keeps", "wrapped", "forward"])
def test_methods_that_may_use_anything_of_the_model_are_refused(method):
    with pytest.raises(UserError, match=r"^layer 1 of layers= .* uses the whole model"):
        layers_of(Language(), lambda m: [m.body.block, getattr(m, method)])


def test_what_stages_may_have_together():
    """A table that is saved nowhere; a weight of layers in the same stage."""
    assert of(with_table(False), lambda m: [m.one, m.other]).ranges == [range(1), range(1, 2)]
    model = tied()
    assert len(of(model, lambda m: [m.one, m.other], 1).ranges) == 1
