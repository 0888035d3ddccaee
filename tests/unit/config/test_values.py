"""Values of run files: what each type of key takes, and what it refuses."""

from typing import Any, Literal

import pytest
import yaml

from hpctrain.config.reference import keys, meanings
from hpctrain.config.values import Misfit, converted, in_words, of_word, read_yaml, unquoted

Shape = Literal["flat", "on"]
KEYS = keys()
MEANINGS = dict(zip(KEYS, meanings(), strict=True))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ('"3"', int, 3),
        ("1_000", int, 1000),
        ("0x1F", int, 31),
        ("1e-3", float, 1e-3),
        ("true", bool, True),
        ("on", bool, True),
        ("no", bool, False),
        ("017", str, "017"),
        ("on", Shape, "on"),
        ("null", Shape | None, None),
        ("null", int | None, None),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ("", tuple[int, ...], ()),
        ("{a: b}", dict[str, str], {"a": "b"}),
        ("", dict[str, str], {}),
        ("[1, {a: null}]", Any, [1, {"a": None}]),
    ],
)
def test_values_of_a_file(text, kind, value):
    found = converted(unquoted(read_yaml(text), kind), kind)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "wrong"),
    [
        ("null", int, None),
        ("null", str, None),
        ("null", Shape, None),
        ("3.0", int, 3.0),
        ("true", int, True),
        ("1", bool, 1),
        ("true", float, True),
        ("maybe", bool, "maybe"),
        ("many", int, "many"),
        ("1.10", str, 1.1),  # as text it would be 1.1
        ("round", Shape, "round"),
        ("[1, a]", tuple[int, ...], "a"),
        ('["3"]', tuple[int, ...], "3"),
        ("3", tuple[int, ...], 3),
        ("{a: true}", dict[str, str], True),
        ("{1: a}", dict[str, Any], 1),
        ('"[1"', tuple[int, ...], "[1"),
    ],
)
def test_what_does_not_fit_is_named(text, kind, wrong):
    with pytest.raises(Misfit) as caught:
        converted(unquoted(read_yaml(text), kind), kind)
    assert caught.value.value == wrong and type(caught.value.value) is type(wrong)


@pytest.mark.parametrize(
    ("word", "kind", "value"),
    [
        ("3", int, 3),
        ("3", str, "3"),
        ("null", str, "null"),
        ("null", str | None, None),
        ("[a]", str | None, "[a]"),
        ("[a]", tuple[str, ...], ["a"]),
        ("{a: 1}", dict[str, Any], {"a": 1}),
        ("1e-3", Any, 1e-3),
        ("a: b: c", Any, "a: b: c"),
    ],
)
def test_words_are_text_where_text_is_taken(word, kind, value):
    assert of_word(word, kind) == value


@pytest.mark.parametrize("name", KEYS)
def test_every_key_takes_its_default_has_a_type_in_words_and_a_meaning(name):
    key = KEYS[name]
    assert in_words(key.kind)
    assert MEANINGS[name]
    if key.default is not None:
        assert yaml.safe_load(key.default) == read_yaml(key.default)
        converted(read_yaml(key.default), key.kind)
