"""State that a task declares: saved, given back, shared out over other numbers of ranks, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint.inspect import compare, summarize, summary_tree, tensor_differences, tensor_summaries
from hpctrain.checkpoint.object_state import OBJECTS, restore, state_of
from hpctrain.checkpoint.reading import Loaded
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.train.state import Placement
from hpctrain.train.stateful import PerRank, kept_state, unchanged, value_of
from hpctrain.train.tree import Leaves

LEAVES = Leaves()
EVERYTHING = {
    "level": 3,
    "losses": [0.5, float("inf")],
    "note": "é",
    "none": None,
    "raw": b"\x00\xff",
    "scale": np.float32(1.5),
    "by": {"a/b": np.arange(3), 7: (True, [])},
    "empty": np.zeros((0, 2)),
}


class Box:
    """Its state is whatever it holds."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, saved: Any) -> None:
        self.held = saved


class Lanes(Box):
    """An array whose rows are shared out."""

    def merge(self, states: Sequence[Any]) -> Any:
        return np.concatenate(states)

    def split(self, whole: Any, rank: int, ranks: int) -> Any:
        return np.array_split(whole, ranks)[rank]


class Ranks:
    """A group seen by one of its ranks, for what asks nothing of the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def saved_by(makers: Sequence[Callable[[], Mapping[str, Any]]], ranks: int, rank: int) -> Loaded:
    """What a rank among ``ranks`` reads of a checkpoint that each maker's state, of one rank, is in."""
    states = [state_of(kept_state(make()), LEAVES) for make in makers]
    arrays, of_ranks = {}, {}
    for number, state in enumerate(states):
        for tensor in state.tensors:
            if tensor.placement is Placement.FIRST:
                arrays.update({tensor.name: value_of(tensor)} if number == 0 else {})
            elif len(states) == ranks:
                arrays.update({tensor.name: value_of(tensor)} if number == rank else {})
            else:
                of_ranks.setdefault(tensor.name, {})[number] = value_of(tensor)
    dtypes = {tensor.name: tensor.dtype for state in states for tensor in state.tensors}
    meta = {OBJECTS: states[0].placements}
    return Loaded(1, Path("runs/x/step-1"), len(states), meta, arrays, dtypes, (), of_ranks)


def resumed(declared: Mapping[str, Any], loaded: Loaded, rank: int = 0, ranks: int = 1, *accepted: str) -> list[str]:
    """What is told when a rank takes over its state."""
    return restore(kept_state(declared), loaded, LEAVES, Ranks(rank, ranks), accepted)  # type: ignore[arg-type]


def test_all_kinds_of_values_come_back_as_they_were():
    box = Box(None)
    assert resumed({"all": box}, saved_by([lambda: {"all": Box(EVERYTHING)}], 1, 0)) == []
    assert repr(box.held) == repr(EVERYTHING)
    assert type(box.held["scale"]) is np.float32


def test_all_ranks_take_over_that_of_rank_0():
    loaded = saved_by([lambda: {"level": Box(3)}, lambda: {"level": Box(4)}], 3, 2)
    box = Box(None)
    assert resumed({"level": box}, loaded, 2, 3) == [] and box.held == 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("old", [1, 2, 4])
def test_what_can_be_split_is_shared_out_in_order(old, ranks):
    rows = np.arange(10).reshape(5, 2)
    makers = [lambda part=part: {"lanes": PerRank(Lanes(part), "split")} for part in np.array_split(rows, old)]
    parts = []
    for rank in range(ranks):
        lanes = Lanes(None)
        told = resumed({"lanes": PerRank(lanes, "split")}, saved_by(makers, ranks, rank), rank, ranks)
        assert told == ([] if old == ranks else [f"state 'lanes' of {old} ranks is split over {ranks}"])
        parts.append(lanes.held)
    assert np.concatenate(parts).tolist() == rows.tolist()
    assert [len(part) for part in parts] == [len(part) for part in np.array_split(rows, ranks)]


@pytest.mark.parametrize(("rule", "held"), [("keep", [10, 11, "new"]), ("reset", ["new", "new", "new"])])
def test_other_numbers_of_ranks_keep_or_reset(rule, held):
    makers = [lambda number=number: {"one": PerRank(Box(number), rule)} for number in (10, 11)]
    boxes = [Box("new") for _ in held]
    told = [
        resumed({"one": PerRank(box, rule)}, saved_by(makers, 3, rank), rank, 3)[0] for rank, box in enumerate(boxes)
    ]
    assert [box.held for box in boxes] == held
    assert "state 'one' of 2 ranks" in told[0] and "begin" in told[0]


@pytest.mark.parametrize(
    ("declared", "problem", "fix"),
    [
        ({}, r"holds state 'level', which the task no longer has", "--accept state.level"),
        (
            {"level": Box(0), "more": Box(1)},
            r"the task has state 'more', of which runs/x/step-1",
            "--accept state.more",
        ),
        ({"level": PerRank(Box(0))}, r"as one for all ranks, and the task declares it as each rank its own", "PerRank"),
    ],
)
def test_another_state_than_the_saved_one_is_refused(declared, problem, fix):
    with pytest.raises(UserError, match=problem) as caught:
        resumed(declared, saved_by([lambda: {"level": Box(3)}], 1, 0))
    assert fix in caught.value.fix


def test_what_is_new_or_gone_can_be_accepted():
    box = Box("new")
    told = resumed({"more": box}, saved_by([lambda: {"level": Box(3)}], 1, 0), 0, 1, "state.level", "state.more")
    assert box.held == "new" and [line.partition(", as accepted")[0] for line in told] == [
        "state 'level' is left out",
        "state 'more' begins as the task made it",
    ]


def test_an_error_while_loading_is_one_sentence_with_the_state_and_the_line():
    class Strict(Box):
        def load_state_dict(self, saved):
            self.held = saved["missing"]

    with pytest.raises(UserError, match=r"state 'level': it cannot load .*: KeyError: 'missing' \(test_object"):
        resumed({"level": Strict(0)}, saved_by([lambda: {"level": Box({})}], 1, 0))


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        (["box"], "state= of the task is a list"),
        ({"a/b": Box(1)}, "has the key 'a/b'"),
        ({3: Box(1)}, "has the key 3"),
        ({"level": 3}, "state 'level' of the task is an int, which does not say what its state is"),
        ({"level": Box}, "state 'level' of the task is the class Box"),
        ({"level": Box({"seen": {1, 2}})}, "the state_dict of state 'level', seen is a set, which cannot be saved"),
        ({"level": Box({"x": np.array([object()])})}, "state 'level', x is an ndarray, which cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(declared, problem):
    with pytest.raises(UserError, match=problem):
        state_of(kept_state(declared), LEAVES)


def test_a_value_that_holds_itself_is_refused():
    held: list[Any] = []
    held.append(held)
    with pytest.raises(UserError, match="state 'loop' is nested too deeply, or holds itself"):
        state_of(kept_state({"loop": Box(held)}), LEAVES)


@pytest.mark.parametrize(("rule", "problem"), [("split", "cannot be split"), ("mean", "'mean'\\) is not a rule")])
def test_a_wrong_rule_is_refused_where_it_is_written(rule, problem):
    with pytest.raises(UserError, match=problem):
        PerRank(Box(1), rule)


def test_the_layout_stays_while_texts_and_lists_grow_a_little():
    def shapes(held):
        return [(tensor.name, tensor.shape) for tensor in state_of(kept_state({"s": Box(held)}), LEAVES).tensors]

    assert shapes({"file": "a.tar", "n": [1.0]}) == shapes({"file": "abc.tar", "n": [1.0] * 3})


def test_rehearsals_change_nothing():
    box, arrays = Box({"seen": 1}), Box(np.arange(3))
    with unchanged(kept_state({"box": box, "arrays": PerRank(arrays)}), LEAVES):
        box.held["seen"] = 2
        arrays.held += 1
    assert box.held == {"seen": 1} and arrays.held.tolist() == [0, 1, 2]


def test_inspection_shows_what_objects_said_and_each_rank():
    makers = [
        lambda number=number: {"level": Box({"at": 3}), "lanes": PerRank(Box({"h": np.full(2, number)}))}
        for number in (5, 6)
    ]
    loaded = saved_by(makers, alone().everyone.size, 0)
    lines = list(summary_tree(tensor_summaries(loaded, "state")))
    assert any('{"at": 3}' in line for line in lines)
    assert [one.mean for one in tensor_summaries(loaded, "state/lanes") if "/h (" in one.name] == [5, 6]
    assert any("structure (rank 1)" in line and '{"h": "<h>"}' in line for line in lines)
    assert tensor_differences(loaded, loaded) == []


def test_complex_values_that_differ_in_phase_differ():
    before, after = np.array([3.0, 1.0], np.complex64), np.array([3.0j, 1.0], np.complex64)
    found = compare("w", {"w": (lambda: before, "complex64")}, {"w": (lambda: after, "complex64")})
    assert found is not None and found.largest == pytest.approx(18**0.5) and found.changed == 1
    assert summarize("w", after, "complex64").most == 3.0
