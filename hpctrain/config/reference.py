"""The keys of a run file as the dataclasses tell them: for error messages and for the reference page."""

from __future__ import annotations

import dataclasses
import functools
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from hpctrain.config.sections import Config
from hpctrain.system import foreign_text


@dataclass(frozen=True)
class Leaf:
    """One key."""

    type: str
    """In words."""
    default: str
    """As YAML, or ``required``."""
    meaning: str
    """The field's docstring."""


@functools.cache
def leaves() -> dict[str, Leaf]:
    """Every key that holds a value, dotted, in the order of the sections."""
    return dict(_walk(Config, ""))


def reference() -> str:
    """All keys as a Markdown table."""
    rows = [f"| `{key}` | {leaf.type} | {leaf.default} | {leaf.meaning} |" for key, leaf in leaves().items()]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def help_text(width: int = 100) -> str:
    """All keys as options, for ``--help``."""
    lines = ["keys of the run file, each an option that wins over it:"]
    for key, leaf in leaves().items():
        default = leaf.default.strip("`")
        text = f"{leaf.meaning} ({leaf.type}; {default if default == 'required' else f'default {default}'})"
        lines.append(f"  --{key}")
        lines += textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def _walk(section: type, prefix: str) -> Iterator[tuple[str, Leaf]]:
    from docstring_parser import parse_from_object

    types = typing.get_type_hints(section)
    meanings = {entry.arg_name: entry.description for entry in parse_from_object(section).params}
    for entry in dataclasses.fields(section):
        if dataclasses.is_dataclass(types[entry.name]):
            yield from _walk(types[entry.name], f"{prefix}{entry.name}.")
        else:
            meaning = " ".join((meanings.get(entry.name) or "").split())
            yield prefix + entry.name, Leaf(_in_words(types[entry.name]), _default(entry), meaning)


def _default(entry: dataclasses.Field[Any]) -> str:
    value = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    return f"`{yaml.safe_dump(list(value) if isinstance(value, tuple) else value).splitlines()[0]}`"


def _in_words(hint: Any) -> str:
    given = [each for each in typing.get_args(hint) if each is not type(None)]
    if type(None) in typing.get_args(hint) and len(given) == 1:
        hint = given[0]
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    name = str(hint) if typing.get_args(hint) else hint.__name__
    name = re.sub(r"tuple\[(\w+), \.\.\.\]", r"list of \1", name)
    name = re.sub(r"dict\[.*\]", "mapping", name)
    words = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    return re.sub(r"\b(str|int|float|bool)\b", lambda match: words[match.group(0)], name)


if __name__ == "__main__":
    foreign_text.show(reference(), end="")
