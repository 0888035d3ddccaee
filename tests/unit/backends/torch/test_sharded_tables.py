"""Tables that ranks with different samples share out give what whole ones give, and each row that is needed travels
once."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain import vocabulary
from hpctrain.backends.torch.strategies.sharded_tables import ShardedTables, cut_tables, tables_of
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.comm.group import Group
from hpctrain.config.loading import load
from hpctrain.errors import UserError
from hpctrain.rank.trial import try_task
from tests.support.thread_groups import Messages, ThreadGroup, in_threads
from tests.tasks import table_tasks

PAGE = Path(__file__).parents[4] / "docs" / "sharding.md"
ROWS, WIDTH = 11, 3
PLACES: dict[str, Sequence[Any]] = {
    "repeated": ([[3, 3, 10], [3, 5, 0]], [[3, 3, 3]], [[10, 9]], [[5, 5]]),
    "of others": ([10, 9], [0, 1], [0], [3, 4, 5]),
    "of one rank": ([0], [1, 1], [2], [0]),
    "none of some": ([], [10], [], [1, 1]),
    "none": ([], [], [], []),
}


def table(**options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, padding_idx=5, **options).double())


def cut(model: nn.Sequential, group: Group) -> ShardedTables:
    return cut_tables(model, tables_of(model, {"*": vocabulary}), TPGroup(group), [])


def weight_of(layer: nn.Module) -> Tensor:
    """This rank's rows."""
    return next(layer.parameters())


def loss_of(values: Tensor) -> Tensor:
    weights = torch.arange(values.numel(), dtype=torch.float64).reshape(values.shape).cos()
    return (values.square() * weights).sum()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("ranks", [2, 4])
def test_vectors_and_gradients_are_those_of_the_whole_table(ranks: int, places: Sequence[Any], sparse: bool) -> None:
    whole, given = table(), table(sparse=sparse)
    indices = [torch.tensor(each, dtype=torch.int64) for each in places[:ranks]]
    wanted = [whole(each) for each in indices]
    torch.stack([loss_of(values) for values in wanted]).sum().backward()

    def on_a_rank(group: ThreadGroup) -> bool:
        model = copy.deepcopy(given)
        part = cut(model, Messages(group)).slices["0.weight"]
        values = model(indices[group.rank])
        assert torch.equal(values, wanted[group.rank])
        loss_of(values).backward()
        gradient = weight_of(model[0]).grad
        found = gradient.to_dense() if gradient.is_sparse else gradient
        assert gradient.is_sparse == sparse
        torch.testing.assert_close(found, part.of(whole[0].weight.grad), rtol=0, atol=1e-12)
        return True

    assert all(in_threads(ranks, on_a_rank))


BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean without padding": {"mode": "mean", "padding_idx": 3},
    "max": {"mode": "max"},
    "last offset": {"mode": "sum", "include_last_offset": True},
}


@pytest.mark.parametrize("options", BAGS.values(), ids=BAGS.keys())
def test_bags_are_those_of_the_whole_table(options: dict[str, Any]) -> None:
    """Also of a rank that has empty bags alone."""
    bags = [torch.tensor([3, 1, 10, 10, 0]), torch.tensor([], dtype=torch.int64)]
    offsets = [torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0])]
    weights = [torch.tensor([0.5, 1, 2, 3, 4], dtype=torch.float64), torch.tensor([], dtype=torch.float64)]

    def values(layer: nn.EmbeddingBag, rank: int) -> Tensor:
        at = offsets[rank] if options.get("include_last_offset") else offsets[rank][:-1]
        found: Tensor = layer(bags[rank], at, weights[rank] if layer.mode == "sum" else None)
        return found

    torch.manual_seed(1)
    whole = nn.EmbeddingBag(ROWS, WIDTH, **options).double()
    given = nn.Sequential(copy.deepcopy(whole))
    wanted = [values(whole, rank) for rank in range(2)]
    torch.stack([loss_of(each) for each in wanted]).sum().backward()

    def on_a_rank(group: ThreadGroup) -> bool:
        model = copy.deepcopy(given)
        part = cut(model, Messages(group)).slices["0.weight"]
        found = values(model[0], group.rank)
        assert torch.equal(found, wanted[group.rank])
        loss_of(found).backward()
        torch.testing.assert_close(weight_of(model[0]).grad, part.of(whole.weight.grad), rtol=0, atol=1e-12)
        return True

    assert all(in_threads(2, on_a_rank))


def test_a_loss_may_hold_gradients() -> None:
    """By the rows, and of these by the rows again."""
    indices = [torch.tensor([1, 1, 10]), torch.tensor([10, 7])]

    def second(model: nn.Sequential, each: Sequence[Tensor]) -> Tensor:
        total = torch.stack([loss_of(model(one)) for one in each]).sum()
        (slope,) = torch.autograd.grad(total, weight_of(model[0]), create_graph=True)
        (found,) = torch.autograd.grad(slope.square().sum(), weight_of(model[0]))
        return found

    given = table()
    wanted = second(given, indices)

    def on_a_rank(group: ThreadGroup) -> bool:
        model = copy.deepcopy(given)
        part = cut(model, Messages(group)).slices["0.weight"]
        found = second(model, [indices[group.rank]])
        torch.testing.assert_close(found, part.of(wanted), rtol=0, atol=1e-12)
        return True

    assert all(in_threads(2, on_a_rank))
    assert wanted.abs().max() > 1e-3


class Counting(Messages):
    """Counts what it sends."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group)
        self.sent: list[int] = []

    def post(self, values: Any, rank: int, tag: int) -> Callable[[], bool]:
        self.sent.append(values.nbytes)
        return super().post(values, rank, tag)


def test_what_travels_is_each_index_and_its_row_once() -> None:
    """The first of two ranks asks for three rows of the other one, which asks for none, many times."""

    def on_a_rank(group: ThreadGroup) -> list[int]:
        counting = Counting(group)
        model = table()
        cut(model, counting)
        indices = torch.tensor([[6, 7, 10, 0] * 50] * 10) if group.rank == 0 else torch.tensor([9, 9])
        model(indices).sum().backward()
        return counting.sent

    place, row, number = 16, WIDTH * 8, 8
    first, second = in_threads(2, on_a_rank)
    assert first == [place, 3 * number, place, place, 3 * row]
    assert second == [place, 3 * row, place, place]


@pytest.mark.parametrize("index", [-1, ROWS])
def test_indices_that_no_rank_has(index: int) -> None:
    """Are this rank's own error, before it speaks to others."""
    group = Group("alone")
    model = table()
    cut(model, group)
    with pytest.raises(IndexError, match="index out of range in 0"):
        model(torch.tensor([0, index]))


class Two(nn.Module):
    """Tables that are looked up in some order, or not at all."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a, self.b, self.order = nn.Embedding(4, 2), nn.Embedding(4, 2), order

    def forward(self, words: Tensor) -> Tensor:
        return torch.stack([getattr(self, name)(words) for name in self.order]).sum()


@pytest.mark.parametrize(
    ("orders", "said"),
    [(("ab", "ba"), "reached a, another b"), (("ab", "a"), "reached b, another the end of a forward")],
)
def test_ranks_that_look_up_other_tables_are_told(orders: tuple[str, str], said: str) -> None:
    def on_a_rank(group: ThreadGroup) -> str:
        model = Two(orders[group.rank])
        cut_tables(model, tables_of(model, {"?": vocabulary}), TPGroup(Messages(group)), [])
        with pytest.raises(UserError) as refused:
            model(torch.tensor([0, 3])).backward()
        return refused.value.what

    assert said in in_threads(2, on_a_rank)[0]


def test_gradients_that_come_back_in_other_orders_are_told() -> None:
    """One rank's loss leaves a table out."""

    def on_a_rank(group: ThreadGroup) -> str:
        model = Two("ab")
        cut_tables(model, tables_of(model, {"?": vocabulary}), TPGroup(Messages(group)), [])
        values = [model.a(torch.tensor([1])), model.b(torch.tensor([2]))]
        with pytest.raises(UserError) as refused:
            values[group.rank].sum().backward()
        return refused.value.what

    assert "reached gradients of a, another gradients of b" in in_threads(2, on_a_rank)[0]


def test_a_loss_that_needs_no_table_on_one_rank_is_told() -> None:
    def on_a_rank(group: ThreadGroup) -> str:
        model = Two("ab")
        tables = cut_tables(model, tables_of(model, {"?": vocabulary}), TPGroup(Messages(group)), [])
        value = model(torch.tensor([1]))
        with pytest.raises(UserError) as refused:
            if group.rank == 0:
                value.backward()
            tables.finish(torch.device("cpu"))
        return refused.value.what

    assert "gradients of b, another the end of a backward pass" in in_threads(2, on_a_rank)[0]


def test_what_asks_for_the_weight_of_a_table_is_refused() -> None:
    """A penalty, or logits over all words: each rank has other rows. Optimizers and checkpoints know them."""
    model = Two("ab")
    before = list(model.parameters())
    cut_tables(model, tables_of(model, {"a": vocabulary}), TPGroup(Group("alone")), [])
    with pytest.raises(UserError, match=r"a\.weight is used, and each rank has different rows"):
        model.a.weight.square()
    assert model.b.weight is before[1] and next(model.parameters()) is before[0]


PENALTIES: dict[str, Callable[[list[Tensor]], Any]] = {
    "squares": lambda every: torch.stack([one.square().sum() for one in every]).sum(),
    "norms": torch._foreach_norm,
    "data": lambda every: [one.data.sum() for one in every],
    "product": lambda every: torch.ones(2, 4) @ every[0],
}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES.keys())
def test_parameters_that_a_pass_computes_with_are_refused(penalty: Callable[[list[Tensor]], Any]) -> None:
    """Each rank would add up its rows alone. Where a model's values are may be asked."""
    model = Two("ab")
    wanted = [(one.device, one.dtype, one.shape, one.requires_grad) for one in model.parameters()]
    tables = cut_tables(model, tables_of(model, {"a": vocabulary}), TPGroup(Group("alone")), [])
    with tables.passing():
        model(torch.tensor([1])).backward()
        found = list(model.parameters())
        assert [(one.device, one.dtype, one.shape, one.requires_grad) for one in found] == wanted
        assert all(isinstance(one, nn.Parameter) for one in found)
        with pytest.raises(UserError, match=r"a\.weight is used, and each rank has different rows"):
            penalty(found)
    assert penalty(list(model.parameters())) is not None


def test_the_page_shows_a_task_whose_tables_can_be_shared_out(tmp_path: Path) -> None:
    *_, example = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (tmp_path / "task.py").write_text(example, encoding="utf-8")
    found: dict[str, Any] = {}
    exec(example, found)  # noqa: S102  a program of ours, from the docs
    task = found["task"](50, 20)
    assert [one.name for one in tables_of(task.model, task.tensor)] == ["user", "tags"]
    given = {
        "task": f"{tmp_path}/task.py:task",
        "task_args": {"users": 50, "tags": 20},
        "parallel": {"shard": "tables"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "a", **given, "train": {"steps": 1, "global_batch": 4}}))
    try_task(load(tmp_path / "run.yaml"))


class Shared(nn.Module):
    """A table whose weight a layer has, too, and one that is no plain table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.bounded = nn.Embedding(8, 4, max_norm=1.0)
        self.often = nn.Embedding(8, 4, scale_grad_by_freq=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("words", "words and head share their weight"),
        ("bounded", "splits bounded, an Embedding with max_norm"),
        ("often", "splits often, an Embedding with max_norm or scale_grad_by_freq"),
        ("head", "splits head, a Linear, by vocabulary, which takes a plain torch.nn.Embedding or EmbeddingBag"),
        ("no", "no layer of the model is called no"),
    ],
)
def test_tables_that_cannot_be_cut(name: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        tables_of(Shared(), {name: vocabulary})
    assert said in refused.value.what


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_tables_gradient_are_refused(hook: str) -> None:
    """Of a layer that is whole on each rank they are called as ever."""
    model = Two("ab")
    getattr(model.b.weight, hook)(lambda given: None)
    with pytest.raises(UserError, match=r"b\.weight has hooks of its gradient"):
        tables_of(model, {"?": vocabulary})
    assert [one.name for one in tables_of(model, {"a": vocabulary})] == ["a"]


TASKS = Path(table_tasks.__file__)


@pytest.mark.parametrize(
    ("task", "said"),
    [("unmarked", "marks no table by hpctrain.vocabulary"), ("wrong", "no layer of the model is called tables.usres")],
)
def test_one_process_sees_that_tables_are_not_marked(task: str, said: str, tmp_path: Path) -> None:
    """hpctrain doctor and hpctrain check try a task so."""
    given = {"name": "a", "task": f"{TASKS}:{task}", "parallel": {"shard": "tables"}}
    (tmp_path / "run.yaml").write_text(json.dumps(given | {"train": {"steps": 1, "global_batch": 4}}))
    with pytest.raises(UserError, match=re.escape(said)):
        try_task(load(tmp_path / "run.yaml"))
