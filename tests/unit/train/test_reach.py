"""What an object of the user's holds is found wherever it is, and libraries are left alone."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from hpctrain.train.reach import MOST_ITEMS, Place, Reach


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
    return {place.path for place in Reach().places(root) if isinstance(place.value, Wanted)}


def numbers(root: Any) -> dict[str, Place]:
    return {place.path: place for place in Reach().places(root) if isinstance(place.value, (int, float))}


def closing_over(wanted: Any) -> Any:
    unbound: Any

    def function(default: Any = wanted) -> Any:
        return wanted, unbound, helper()

    if wanted is None:
        unbound = 3
    return function


def test_everything_that_is_held_is_found_by_its_path() -> None:
    plain = Holder(a=Wanted(), b=[Wanted(), {"c": (Wanted(),)}], d=deque([{7: Wanted()}]))
    assert paths(plain) == {"a", "b.0", "b.1.c.0", "d.0.7", "method.SEEN_BY_METHOD"}
    assert paths(plain.method) == paths(plain)
    assert paths(functools.partial(print, Wanted(), key=Wanted())) == {"0", "key"}
    assert paths(closing_over(Wanted())) == {"wanted", "helper.SEEN_BY_HELPER"}
    assert paths(Wanted()) == {""}
    assert paths(types.SimpleNamespace(a=Wanted())) == {"a"}


def test_each_object_comes_once_also_in_a_circle() -> None:
    wanted = Wanted()
    first = Holder(wanted=wanted)
    first.second = Holder(first=first, wanted=wanted)
    assert paths(first) == {"wanted", "method.SEEN_BY_METHOD"}


def test_libraries_and_data_are_left_alone() -> None:
    decoder = json.JSONDecoder()
    vars(decoder)["wanted"] = Wanted()
    assert paths(Holder(decoder=decoder, logger=logging.getLogger(), module=json, kind=Holder)) == {
        "method.SEEN_BY_METHOD"
    }
    assert paths([Wanted()] * (MOST_ITEMS + 1)) == set()
    assert paths({index: Wanted() for index in range(MOST_ITEMS + 1)}) == set()


def test_an_installed_package_of_the_users_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "my_losses.py").write_text("class Loss:\n    pass\n\n\ndef around(held):\n    return lambda: held\n")
    monkeypatch.syspath_prepend(folder)
    my_losses = importlib.import_module("my_losses")
    loss = my_losses.Loss()
    loss.wanted = Wanted()
    assert paths(loss) == {"wanted"} and paths(my_losses.around(loss)) == {"held.wanted"}
    assert paths(Holder(library=loss)) == {"method.SEEN_BY_METHOD"}


def test_numbers_can_be_replaced_where_they_are() -> None:
    count = 5

    def function() -> int:
        nonlocal count
        count += 1
        return count

    holder = Holder(a=1, b=[2.0, {"c": True}], d=(4,))
    found = numbers(holder) | numbers(function)
    for path, value in {"a": 10, "b.0": 20.0, "b.1.c": False, "count": 50}.items():
        put = found[path].put
        assert put is not None
        put(value)
    assert (holder.a, holder.b, function()) == (10, [20.0, {"c": False}], 51)
    assert found["d.0"].put is None
