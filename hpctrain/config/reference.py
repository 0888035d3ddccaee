"""The keys of a run file, taken from the dataclasses: for error messages, ``hpctrain keys`` and the docs."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterator, Sequence

import yaml

from hpctrain.config.features import Feature, values_of
from hpctrain.config.sections import Config
from hpctrain.config.values import in_words, json_type


@dataclasses.dataclass(frozen=True)
class Key:
    """One key that holds a value."""

    kind: typing.Any
    """The field's type."""
    default: str | None
    """As YAML; None if the key is required."""
    section: type
    """The dataclass whose field it is."""


@functools.cache
def keys() -> dict[str, Key]:
    """Every key that holds a value, dotted, in the order of the sections."""
    return dict(_walk(Config, ""))


@functools.cache
def sections() -> list[str]:
    """The keys that hold other keys."""
    parts = [key.split(".")[:-1] for key in keys()]
    return list(dict.fromkeys(".".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)))


def meanings() -> list[str]:
    """The docstring of each key's field, and of features that it can have as values, from the source: Python does not
    keep them."""
    of_features = _docstrings(Feature)
    by_section = {section: _docstrings(section) for section in {key.section for key in keys().values()}}
    found = []
    for name, key in keys().items():
        values = [
            f"{word}: {of_features[one.name]}" for word, one in values_of(name).items() if one.name in of_features
        ]
        found.append(" ".join([by_section[key.section][name.rpartition(".")[2]], *values]))
    return found


def help_text(words: Sequence[str] = (), width: int = 100) -> str:
    """The keys whose name or meaning has all of ``words``, with type, default and meaning; empty if there are none.

    Each must begin a word or a part of a name: "allreduce" does not have ``lr``. If no key has all of them so, they may
    stand anywhere.
    """
    texts = {}
    for (name, key), meaning in zip(keys().items(), meanings(), strict=True):
        default = "required" if key.default is None else f"default {key.default}"
        texts[name] = f"{meaning.replace('``', '')} ({in_words(key.kind)}; {default})"
    for begin in (r"(?<![a-z0-9])", ""):
        wanted = [re.compile(begin + re.escape(word.lower())) for word in words]
        found = [name for name in texts if all(one.search(f"{name} {texts[name]}".lower()) for one in wanted)]
        if found:
            break
    lines = []
    for name in found:
        lines += [name, *textwrap.wrap(texts[name], width, initial_indent=" " * 8, subsequent_indent=" " * 8)]
    return "".join(f"{line}\n" for line in lines)


def schema() -> dict[str, typing.Any]:
    """A JSON Schema (draft 2020-12) of the run file: names, types, defaults and meanings of keys."""
    root: dict[str, typing.Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "hpctrain run"}
    for (name, key), meaning in zip(keys().items(), meanings(), strict=True):
        at = root
        for part in name.split("."):
            at.setdefault("type", "object")
            at["additionalProperties"] = False
            at = at.setdefault("properties", {}).setdefault(part, {})
        at |= json_type(key.kind) | {"description": meaning.replace("``", "")}
        if key.default is not None:
            at["default"] = yaml.safe_load(key.default)
    return {**root, "required": [name for name, key in keys().items() if key.default is None]}


def _walk(section: type, prefix: str) -> Iterator[tuple[str, Key]]:
    kinds = typing.get_type_hints(section)
    for entry in dataclasses.fields(section):
        kind = kinds[entry.name]
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, Key(kind, _default(entry), section)


def _docstrings(section: type) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(definition.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(docstring))),
            ):
                found[name] = " ".join(docstring.split())
    return found


def _default(entry: dataclasses.Field[typing.Any]) -> str | None:
    value = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
    if value is dataclasses.MISSING:
        return None
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
