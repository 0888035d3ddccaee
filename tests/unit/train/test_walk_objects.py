"""What an object of the user's holds is found wherever it is, and libraries are left alone."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import types
from collections import deque
from typing import Any

from hpctrain.train.walk_objects import MOST_ITEMS, own_attributes, putting_back, reached


class Wanted:
    """What is looked for."""


class Holder:
    """Holds things in many ways."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def method(self, x: int) -> Any:
        return SEEN_BY_METHOD


SEEN_BY_METHOD = Wanted()
SEEN_BY_HELPER = Wanted()


def helper() -> Any:
    return SEEN_BY_HELPER


def paths(root: Any) -> set[str]:
    """Where there is something wanted."""
    return {path for path, value in reached(root, lambda value: False) if isinstance(value, Wanted)}


def closing_over(wanted: Any) -> Any:
    unbound: Any

    def function(default: Any = wanted) -> Any:
        return wanted, unbound, helper()

    if wanted is None:
        unbound = 3
    return function


def test_everything_that_is_held_is_found_by_its_path():
    plain = Holder(a=Wanted(), b=[Wanted(), {"c": (Wanted(),)}], d=deque([{7: Wanted()}]))
    assert paths(plain) == {"a", "b.0", "b.1.c.0", "d.0.7", "method.SEEN_BY_METHOD"}
    assert paths(plain.method) == paths(plain)
    assert paths(functools.partial(print, Wanted(), key=Wanted())) == {"0", "key"}
    assert paths(closing_over(Wanted())) == {"wanted", "helper.SEEN_BY_HELPER"}
    assert paths(Wanted()) == {""}
    assert paths(types.SimpleNamespace(a=Wanted())) == {"a"}


def test_each_object_comes_once_also_in_a_circle():
    wanted = Wanted()
    first = Holder(wanted=wanted)
    first.second = Holder(first=first, wanted=wanted)
    assert paths(first) == {"wanted", "method.SEEN_BY_METHOD"}


def test_libraries_and_data_are_left_alone():
    decoder = json.JSONDecoder()
    vars(decoder)["wanted"] = Wanted()
    assert paths(Holder(decoder=decoder, logger=logging.getLogger(), module=json, kind=Holder)) == {
        "method.SEEN_BY_METHOD"
    }
    assert paths([Wanted()] * (MOST_ITEMS + 1)) == set()
    assert paths({index: Wanted() for index in range(MOST_ITEMS + 1)}) == set()


def test_an_installed_package_of_the_users_is_the_users(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "my_losses.py").write_text("class Loss:\n    pass\n\n\ndef around(held):\n    return lambda: held\n")
    monkeypatch.syspath_prepend(folder)
    my_losses = importlib.import_module("my_losses")
    loss = my_losses.Loss()
    loss.wanted = Wanted()
    assert paths(loss) == {"wanted"} and paths(my_losses.around(loss)) == {"held.wanted"}
    assert paths(Holder(library=loss)) == {"method.SEEN_BY_METHOD"}


def test_numbers_come_wherever_they_are_also_behind_keys_that_are_no_names():
    count = 5

    def function():
        return count

    held = Holder(a=1, b=[1.0, {"c": True}], d={("x", 2): 4}, function=function)
    found = {path: value for path, value in reached(held, lambda value: False) if isinstance(value, (int, float))}
    assert found == {"a": 1, "b.0": 1.0, "b.1.c": True, "d.0": 4, "function.count": 5}


def test_keys_of_dicts_are_called_by_the_names_of_objects_and_none_is_lost():
    one, other = Wanted(), Wanted()
    names = {id(one): "weight", id(other): "bias"}
    for held in ({one: 1, other: 2}, {id(one): 1, id(other): 2}):
        assert dict(reached(held, lambda value: False, names=names)) == {"": held, "weight": 1, "bias": 2}
    mixed = {1: 3, one: 4, other: 5, "weight": 6, "1": 7}
    found = {path: value for path, value in reached(mixed, lambda value: False) if path}
    assert len(found) == len(mixed) and found["1"] == 3 and found["2"] == 5
    found = {path: value for path, value in reached(mixed, lambda value: False, names=names) if path}
    assert found == {"1": 3, "weight": 4, "bias": 5, "weight'": 6, "1'": 7}


GLOBAL_COUNT = 0


def counting() -> tuple[Holder, Any]:
    """An object and a function that changes it, its own count and that of the module."""
    count = 0
    held = Holder(a=1, none=None, log=[1], last=deque([1, 2], maxlen=2), by={"x": 1}, kept=Wanted())

    def function() -> None:
        global GLOBAL_COUNT
        nonlocal count
        GLOBAL_COUNT += 1
        count += 1
        held.a += 1
        held.none = held.new = 5
        held.log.append(2)
        held.last.append(3)
        held.by["x"] = held.by["y"] = 2
        held.by["object"] = held.kept = Wanted()

    return held, function


def test_plain_values_are_put_back_wherever_they_are_and_objects_are_not():
    held, function = counting()
    before, first = GLOBAL_COUNT, held.kept
    puts = list(
        putting_back(function, lambda value: False, own_attributes, lambda value: isinstance(value, int | None))
    )
    function()
    for put in puts:
        put()
    now = {name: each for name, each in vars(held).items() if name != "kept"}
    assert held.kept is not first and held.by.pop("object") is held.kept
    assert now == {"a": 1, "none": None, "log": [1], "last": deque([1, 2]), "by": {"x": 1}}
    assert before == GLOBAL_COUNT and "count" in function.__code__.co_freevars
    assert dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))["count"].cell_contents == 0


def test_long_lists_and_objects_of_libraries_are_not_put_back():
    decoder, long = json.JSONDecoder(), [0] * (MOST_ITEMS + 1)
    held = Holder(decoder=decoder, long=long)
    puts = list(putting_back(held, lambda value: False, own_attributes, lambda value: isinstance(value, int)))
    vars(decoder)["count"] = 1
    long.append(1)
    for put in puts:
        put()
    assert vars(decoder)["count"] == 1 and len(long) == MOST_ITEMS + 2
