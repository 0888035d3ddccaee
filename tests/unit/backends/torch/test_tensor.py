"""Which layers a tensor group can share out, what each rank gets, and what is refused by name."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hpctrain import UserError, columns, rows, vocabulary
from hpctrain.backends.named_state import plain_name
from hpctrain.backends.torch.strategies.partition import Partition
from hpctrain.backends.torch.strategies.tensor import cut_model, layers_to_cut, slices_of, tilings
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.comm.group import Group
from hpctrain.config.loading import load
from hpctrain.config.sections import Config, LaunchConfig, ParallelConfig, TrainConfig, WrongValue
from hpctrain.rank.fit import fit
from hpctrain.rank.trial import try_task
from hpctrain.system.output import quiet_environment
from hpctrain.tasks.definition import LayerCut
from hpctrain.train.state import Cut, Tiling
from tests.support.thread_groups import in_threads
from tests.tasks import tensor_tasks
from tests.tasks.tensor_tasks import LAYERS, Gpt

PAGES = Path(__file__).parents[4] / "docs"


class OneOf(Group):
    """A rank of several; the others are never asked."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("some")
        self.rank, self.size = rank, size


class Custom(nn.Linear):
    """A layer that may do anything."""


class Everything(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seven = nn.Linear(8, 7)
        self.six = nn.Linear(6, 12)
        self.table = nn.Embedding(9, 4)
        self.bounded = nn.Embedding(8, 4, max_norm=1.0)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.custom = Custom(4, 4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.encoder = nn.TransformerEncoderLayer(8, 2)
        self.parts = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no layer": ({"blocks.*.up": columns}, "no layer of the model is called blocks.*.up"),
    "no word": ({"six": "columns"}, "tensor['six'] of the task is a str"),
    "outputs": ({"seven": columns}, "seven has 7 outputs, which 2 ranks cannot split equally"),
    "parts": ({"six": columns(parts=4)}, "six has 12 outputs in 4 parts, which 2 ranks"),
    "attention": ({"attention": columns}, "splits attention, and MultiheadAttention of torch.nn may use its weights"),
    "part of it": ({"attention.out_proj": rows}, "splits attention.out_proj, and MultiheadAttention of torch.nn"),
    "rows": ({"table": vocabulary}, "table has 9 rows, which 2 ranks cannot split equally"),
    "heads": ({"six": columns(heads=3)}, "six has 12 outputs in 3 heads, which 2 ranks cannot divide equally"),
    "heads of a size": ({"six": columns(heads=8)}, "six has 12 outputs in 8 heads"),
    "kind": ({"convolution": columns}, "splits convolution, a Conv1d, by columns, which takes a plain torch.nn.Linear"),
    "another kind": ({"six": vocabulary}, "splits six, a Linear, by vocabulary, which takes a plain torch.nn.Emb"),
    "subclass": ({"custom": columns}, "splits custom, a Custom, by columns"),
    "inside of torch": ({"encoder.linear1": columns}, "TransformerEncoderLayer of torch.nn may use its weights"),
    "max_norm": ({"bounded": vocabulary}, "splits bounded, an Embedding with max_norm"),
    "twice": ({"six": columns, "s?x": rows}, "names six twice, and splits it differently"),
    "tied to a whole one": ({"one": columns}, "one and other share their weight, and tensor= of the task splits it"),
    "tied otherwise": ({"one": columns, "other": rows}, "one and other share their weight"),
}


@pytest.mark.parametrize(("words", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_cut_is_refused_by_name(words, what):
    with pytest.raises(UserError, match=re.escape(what)):
        layers_to_cut(Everything(), words, 2)
    assert layers_to_cut(Everything(), words, 1) == []
    tilings(Everything(), words, plain_name)  # which is asked for one rank, too


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by torch.compile itself
@pytest.mark.parametrize("compiled", [False, True])
def test_tiles_are_of_what_any_number_of_ranks_would_cut(compiled):
    """Also in blocks, and layers of them, that the task has compiled."""
    model: Any = Gpt()
    if compiled:
        model.blocks[1] = torch.compile(model.blocks[1])
        model.blocks[0].down = torch.compile(model.blocks[0].down)
    found = tilings(model, LAYERS, plain_name)
    assert found["blocks.1.qkv.weight"] == found["blocks.1.qkv.bias"] == Tiling(0, parts=3)
    assert found["blocks.0.down.weight"] == Tiling(1) and "blocks.0.down.bias" not in found
    assert found["words.weight"] == Tiling(0), "of the first and the last layer"
    assert len(found) == 2 * 6 + 1


def test_patterns_name_layers():
    found = {one.name: one.word for one in layers_to_cut(Gpt(), LAYERS, 2)}
    assert found["blocks.1.qkv"] == columns(parts=3, heads=4)
    assert len(found) == 2 + 2 * 4
    assert [one.name for one in layers_to_cut(Everything(), {"parts.*2": rows}, 4)] == ["parts.2"]


@pytest.mark.parametrize("options", [{"parts": 0}, {"heads": 0}, {"parts": 3, "gathers": True}])
def test_words_that_mean_nothing(options):
    with pytest.raises(UserError, match=re.escape("columns(parts=")):
        columns(**options)


@given(ranks=st.integers(1, 5), parts=st.integers(1, 4), length=st.integers(1, 3), axis=st.integers(0, 1))
def test_the_parts_of_all_ranks_make_up_the_whole(ranks, parts, length, axis):
    shape = [2, 2]
    shape[axis] = ranks * parts * length
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    found = torch.full_like(whole, -1)
    for rank in range(ranks):
        own = slices_of(tuple(shape), axis, parts, OneOf(rank, ranks), OneOf(0, 1))
        for view, cut in own.views(own.of(whole)):
            place = tuple(slice(first, first + count) for first, count in zip(cut.begin, view.shape, strict=True))
            assert (found[place] == -1).all()
            found[place] = view
    assert torch.equal(found, whole)


@given(
    ranks=st.integers(1, 3),
    data=st.integers(1, 4),
    parts=st.integers(1, 3),
    length=st.integers(1, 3),
    axis=st.integers(0, 1),
)
def test_rows_of_the_parts_of_all_ranks_make_up_the_whole(ranks, data, parts, length, axis):
    shape = [5, 5]
    shape[axis] = ranks * parts * length
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    found = torch.full_like(whole, -1)
    firsts = 0
    for rank, place in itertools.product(range(ranks), range(data)):
        own = slices_of(tuple(shape), axis, parts, OneOf(rank, ranks), OneOf(place, data))
        held = own.of(whole)
        tensor = Partition(TPGroup(OneOf(rank, ranks)), {"weight": own}, frozenset())
        begin, end = (len(held) * each // data for each in (place, place + 1))
        rows_of = tensor.rows("weight", tuple(held.shape), begin, end)
        assert rows_of.is_cut == (ranks > 1)
        firsts += begin < end and rows_of.starts
        for view, cut in rows_of.views(held[begin:end]):
            assert (cut.copy, cut.copies, cut.shape) == (0, 1, tuple(shape)) and view.numel()
            there = tuple(slice(first, first + count) for first, count in zip(cut.begin, view.shape, strict=True))
            assert (found[there] == -1).all()
            found[there] = view
    assert torch.equal(found, whole) and firsts == 1


def test_what_a_group_has_alike_is_shared_out_alike():
    tensor = Partition(TPGroup(OneOf(1, 2)), {}, frozenset())
    found = tensor.rows("norm", (6,), 2, 5)
    assert [cut for _, cut in found.views(torch.zeros(3))] == [Cut((6,), (2,), 1, 2)]
    assert [cut for _, cut in tensor.rows("scale", (), 0, 1).views(torch.zeros(()))] == [Cut((), (), 1, 2)]


def test_parameters_stay_what_optimizers_hold_and_state_from_the_start_is_cut_too():
    model = Gpt()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    qkv, before = model.blocks[0].qkv.weight, model.blocks[0].qkv.weight.detach().clone()
    tensor = cut_model(model, layers_to_cut(model, LAYERS, 2), TPGroup(OneOf(1, 2)), OneOf(0, 1), [optimizer])
    assert model.blocks[0].qkv.weight is qkv and type(qkv) is nn.Parameter
    assert qkv.shape == optimizer.state[qkv]["sum"].shape == (24, 16)
    assert torch.equal(qkv, torch.cat([before[8:16], before[24:32], before[40:48]]))
    assert tensor.slices.keys() == {
        "words.weight",
        *(f"blocks.{n}.{name}" for n in range(2) for name in ("qkv.weight", "qkv.bias", "out.weight")),
        *(f"blocks.{n}.{name}" for n in range(2) for name in ("up.weight", "up.bias", "down.weight")),
    }


def test_values_that_are_whole_where_parts_should_come_are_refused():
    model = Gpt()
    cut_model(model, layers_to_cut(model, {"blocks.*.down": rows}, 2), TPGroup(OneOf(0, 2)), OneOf(0, 1), [])
    with pytest.raises(UserError, match=r"blocks\.0\.down gets 64 inputs, but each rank has weights for 32"):
        model(torch.zeros(1, 7, dtype=torch.int64))


class Potential(nn.Module):
    """An energy, whose gradient by the places is a force."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, places: Tensor) -> Tensor:
        return self.last(self.down(self.up(places).tanh()).tanh())


def of_forces(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a loss that holds a gradient, to which each output gives what depends on all of them."""
    places = torch.arange(15, dtype=torch.float64).reshape(5, 3).sin().requires_grad_()
    (force,) = torch.autograd.grad(model(places).logsumexp(-1).square().sum(), places, create_graph=True)
    (force - 1).square().sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_gradients_of_gradients_are_those_of_the_whole_model():
    model = Potential().double()
    wanted = of_forces(model)
    words = {"up": columns, "down": rows, "last": columns(gathers=True)}

    def on_a_rank(group):
        own = copy.deepcopy(model)
        cut = cut_model(own, layers_to_cut(own, words, 2), TPGroup(group), Group("data"), [])
        found = of_forces(own)
        return max(
            float((found[name] - (cut.slices[name].of(whole) if name in cut.slices else whole)).abs().max())
            for name, whole in wanted.items()
        )

    assert max(in_threads(2, on_a_rank)) < 1e-12


@pytest.mark.parametrize(("other", "goes"), [(2.0, True), (2.0 + 1e-12, True), (2.1, False), (np.nan, False)])
def test_ranks_of_a_group_that_see_other_samples_are_found(other, goes):
    slices = {"weight": slices_of((4, 4), 0, 1, OneOf(0, 2), OneOf(0, 1))}

    def on_a_rank(group):
        try:
            Partition(TPGroup(group), slices, frozenset()).require_same_loss((other if group.rank else 2.0, 3.0), 7)
        except UserError as error:
            return error.what
        return ""

    said = in_threads(2, on_a_rank)
    assert all(what.startswith("in update 7 the losses of ranks") != goes for what in said)


def config(folder: Path, **task_args: Any) -> Config:
    words = {
        "name": "run",
        "task": f"{tensor_tasks.__file__}:gpt",
        "run_dir": folder / "run",
        "train.steps": 1,
        "train.global_batch": 4,
        "parallel.tensor": 2,
    }
    words |= {f"task_args.{key}": value for key, value in task_args.items()}
    return load(None, [word for key, value in words.items() for word in (f"--{key}", str(value))])


def test_one_process_tries_a_task_for_many(tmp_path):
    """As ``hpctrain doctor`` does: the map of the layers is looked at, too."""
    try_task(config(tmp_path))
    with pytest.raises(
        UserError, match="words and head share their weight, and tensor= of the task splits it differently"
    ):
        try_task(config(tmp_path, leave_out="head"))


def test_ranks_that_do_not_make_groups(tmp_path, monkeypatch):
    for name, value in quiet_environment(False, {}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"parallel\.tensor is 2, and 1 rank does not divide into groups of that size"):
        fit(config(tmp_path))


@pytest.mark.parametrize(("tensor", "ranks"), [(2, 3), (4, 2)])
def test_groups_over_two_nodes_are_refused_with_the_run_file(tensor, ranks):
    with pytest.raises(
        WrongValue, match=rf"parallel\.tensor is {tensor}, which does not divide launch\.ranks_per_node"
    ):
        Config(
            name="run",
            task="a:b",
            train=TrainConfig(steps=1, global_batch=4),
            parallel=ParallelConfig(tensor),
            launch=LaunchConfig(ranks_per_node=ranks),
        )


def test_the_page_shows_a_task_that_can_be_cut(tmp_path):
    (without_values,), (example,) = (
        re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.S)
        for page in ("parallel.md", "tensor.md")
    )
    (tmp_path / "task.py").write_text(example, encoding="utf-8")
    found: dict[str, Any] = {}
    exec(example, found)  # noqa: S102  a program of ours, from the docs
    exec(without_values, found)  # noqa: S102  the same
    assert all(each.is_meta for each in found["model"].parameters())
    task = found["task"]()
    assert len(layers_to_cut(task.model, task.tensor, 4)) == 10
    assert all(isinstance(word, LayerCut) for word in task.tensor.values())
    words = ["--name", "run", "--task", f"{tmp_path}/task.py:task", "--train.steps", "1", "--train.global_batch", "4"]
    try_task(load(None, [*words, "--parallel.tensor", "2", "--parallel.pipeline", "4"]))


@pytest.mark.parametrize("differ", [False, True])
def test_replicated_gradients_may_be_sparse(differ):
    def on_a_rank(group):
        table = nn.Parameter(torch.ones(3, 2))
        table.grad = torch.sparse_coo_tensor(
            [[1]], torch.ones(1, 2) + group.rank * differ, (3, 2), check_invariants=False
        ).coalesce()
        partition = Partition(TPGroup(group), {"cut": slices_of((4, 4), 0, 1, OneOf(0, 2), OneOf(0, 1))}, frozenset())
        try:
            partition.require_whole_gradients([("table", table)], group)
        except UserError as error:
            return error.what
        return ""

    assert all(said.startswith("the gradient of table differs") == differ for said in in_threads(2, on_a_rank))
