"""Values that are not what their readers take them for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import pytest

from hpctrain.errors import Code
from hpctrain.system.json_shape import fits, is_count, is_time, maker, sound, without_misfits

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("shape", "right", "wrong"),
    [
        (int, [0, -3, 2**62], [True, 1.0, 2**63, "1", None, [1]]),
        (float, [0, 1.5, -2], [True, INF, NAN, 10**400, "1.0", None]),
        (is_count, [0, 5], [-1, 0.5, True]),
        (is_time, [0, 1.7e9], [-1, 1e12, NAN, "noon"]),
        (str, ["", "x"], [1, None, ["x"]]),
        (bool, [True, False], [0, 1, None]),
        ((str, None), ["x", None], [0, []]),
        ([str], [[], ["x", "y"]], ["x", ["x", 1], {"x": "y"}, None]),
        ({str: float}, [{}, {"a": 1.0}], [{"a": "b"}, [], None]),
        ({"a": int, "b": ([str], None)}, [{}, {"a": 1}, {"a": 1, "b": None, "c": []}], [{"a": "1"}, {"b": [1]}, []]),
        (dict, [{}, {"x": 1}], [[], None, "x"]),
    ],
)
def test_shapes(shape, right, wrong):
    fit = fits(shape)
    assert all(map(fit, right)) and not any(map(fit, wrong))
    assert [sound(shape)(value) for value in right] == right
    for value in wrong:
        with pytest.raises(ValueError):
            sound(shape)(value)


def test_a_misfit_is_left_out():
    fields = {"step": sound(is_count), "by": sound(str)}
    assert without_misfits(fields)({"step": 3, "by": 7, "more": []}) == {"step": 3, "more": []}


class Mood(StrEnum):
    GOOD = "good"


@dataclass(frozen=True)
class Part:
    name: str
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Whole:
    step: int
    host: str | None
    mood: Mood = Mood.GOOD
    code: Code | None = None
    parts: tuple[Part, ...] = ()
    seconds: Mapping[str, float | None] = field(default_factory=dict)


def test_dataclasses_are_read_by_their_types():
    read = maker(Whole)
    assert read({"step": 3}) == read({"step": 3, "host": None, "more": 1}) == Whole(3, None)
    found = read(
        {
            **{"step": 3, "host": "n1", "mood": "good", "code": "of a later version"},
            **{"parts": [{"name": "a", "sizes": {"x": 1}}], "seconds": {"data": None, "forward": 1}},
        }
    )
    assert found == Whole(3, "n1", Mood.GOOD, Code.UNKNOWN, (Part("a", {"x": 1}),), {"data": None, "forward": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        *([], None, "x", {}, {"step": None}, {"step": -1}, {"step": 1.5}, {"step": True}, {"step": 3, "host": 1}),
        *({"step": 3, "mood": "bad"}, {"step": 3, "mood": []}, {"step": 3, "parts": {}}, {"step": 3, "parts": [{}]}),
        *({"step": 3, "parts": [{"name": "a", "sizes": {"x": None}}]}, {"step": 3, "seconds": {"data": "1"}}),
    ],
)
def test_what_is_none_of_a_dataclass_is_refused(wrong):
    with pytest.raises(ValueError):
        maker(Whole)(wrong)


def test_a_field_may_be_read_in_a_way_of_its_own():
    read = maker(Whole, step=sound(is_time))
    assert read({"step": 1.5}) == Whole(1.5, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        read({"step": 1e12})
