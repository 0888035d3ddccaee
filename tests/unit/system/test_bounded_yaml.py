"""YAML stands for no more than it holds."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from hpctrain.system import bounded_yaml
from hpctrain.system.bounded_yaml import DEEPEST

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(params=["libyaml", "PyYAML alone"])
def parse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The parser with libyaml, which wheels of PyYAML contain, and without."""
    if request.param == "libyaml":
        assert issubclass(bounded_yaml.BoundedLoader, yaml.CSafeLoader)
    monkeypatch.setattr(yaml, "__with_libyaml__", request.param == "libyaml")
    found: Callable[[str], Any] = runpy.run_path(bounded_yaml.__file__)["parse"]
    return found


def bomb(levels: int, width: int = 9) -> str:
    """Lists of aliases of lists."""
    lines = [f"a0: &a0 [{','.join('x' * width)}]"]
    lines += [f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * width)}]" for level in range(1, levels)]
    return "\n".join(lines)


def test_aliases_of_ordinary_files_work(parse):
    text = "base: &base {lr: 0.1, steps: [1, 2]}\nfirst: *base\nsecond: [*base, *base]\n"
    base = {"lr": 0.1, "steps": [1, 2]}
    assert parse(text) == {"base": base, "first": base, "second": [base, base]}
    assert parse(bomb(3)) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (bomb(12), "multiply"),
        (bomb(200, width=2), "multiply"),
        (f"a: &a '{'x' * 100_000}'\nb: [{','.join(['*a'] * 1000)}]", "multiply"),
        ("\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, DEEPEST + 1))]), "multiply"),
        ("a: &a [*a]", "part of"),
        ("a: &a {b: {c: *a}}", "part of"),
        ("[" * 10_000, "deeper"),
        ("? " * 10_000, "deeper"),
        ("a: !!timestamp 2001-01-01", "not allowed here"),
        ("a: !!set {b}", "not allowed here"),
        ("a: !!binary aGk=", "not allowed here"),
        ("a: !!python/object/apply:os.system [id]", "could not determine"),
        ("a: !!int abc", "does not fit"),
        ("a: !!bool abc", "does not fit"),
        ("a: 0x" + "f" * 9000, "digits"),
        ("a: " + "9" * 9000, "digits"),
        ("? [a]\n: b", "unhashable"),
    ],
)
def test_what_would_grow_is_refused(text, why, parse):
    with pytest.raises(yaml.YAMLError, match=why):
        parse(text)
