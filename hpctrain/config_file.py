"""Run files: YAML and command-line overrides to a Config, and back, with errors that name the file, line and key."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpctrain.config import Config
from hpctrain.errors import UserError

Lines = dict[str, int]
"""Line, from 1, of each dotted key of a run file."""


class RunFileLoader(yaml.SafeLoader):
    """YAML with the scalars of version 1.2: ``off`` and ``01:30:00`` are text, ``1e-4`` is a number."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


for _tag, _pattern, _first in [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
]:
    _starts = [*_first.replace("\0", ""), *([""] if _tag == "null" else [])]
    RunFileLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _starts)


class RunFileDumper(yaml.SafeDumper):
    """Quotes text that RunFileLoader would read as something else."""

    yaml_implicit_resolvers = RunFileLoader.yaml_implicit_resolvers


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a run file.

    Args:
        path: YAML file with the sections of ``Config``.
        overrides: command-line words such as ``["--train.epochs", "3", "--name=long"]``; they win over the file.

    Raises:
        UserError: no such file, not YAML, an unknown key, a wrong type or a value out of range.
    """
    text = _read(Path(path))
    lines = _check_keys(text, str(path))
    for word in overrides:
        lines.pop(_check_override(word), None)
    return _parse(str(path), text, list(overrides), lines)


def dump(config: Config) -> str:
    """The YAML text that ``load`` reads back to an equal Config."""
    values = _plain(dataclasses.asdict(config))
    return yaml.dump(values, Dumper=RunFileDumper, sort_keys=False, allow_unicode=True, width=100)


def read_yaml(text: str) -> Any:
    """The plain values of a YAML text."""
    return yaml.load(text, Loader=RunFileLoader)  # noqa: S506 (derived from SafeLoader)


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that takes a run file: the file, and any key of it as an option."""
    parser.add_argument("run_file", help="YAML run file")
    parser.set_defaults(overrides=[])
    parser.epilog = "Any key of the run file can be given as an option that wins over it: --train.epochs 3"


def parser() -> Any:
    """The jsonargparse parser of a Config; importing it takes a moment, so it is made when needed."""
    from jsonargparse import ArgumentParser, set_loader, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader("run_file", read_yaml, exceptions=(yaml.YAMLError,))
    made = ArgumentParser(
        prog="hpctrain", exit_on_error=False, allow_abbrev=False, add_help=False, parser_mode="run_file"
    )
    made.add_class_arguments(Config)
    return made


def reference() -> str:
    """Every key with its type, default and meaning, in Markdown."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in _fields(Config, ""):
        rows.append(f"| `{key}` | {kind} | {default} | {meaning} |".replace("||", "|"))
    return "\n".join(rows) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"run file {path} does not exist", "give the path of a YAML run file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"run file {path} cannot be read: {error}", "give a readable YAML file in UTF-8") from error


def _check_keys(text: str, path: str) -> Lines:
    """Lines of all keys; raises on bad YAML, on unknown keys and on keys that stand twice."""
    try:
        root = yaml.compose(text, Loader=RunFileLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line} is not YAML: {error.problem}", "correct the line (indentation, quotes, colons)") from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no keys", "begin with name: and task:")
    lines: Lines = {}
    _walk(root, Config, "", path, lines)
    return lines


def _walk(node: yaml.MappingNode, kind: type, prefix: str, path: str, lines: Lines) -> None:
    types = typing.get_type_hints(kind)
    for key_node, value_node in node.value:
        key = prefix + str(key_node.value)
        line = key_node.start_mark.line + 1
        if key_node.value not in types:
            raise UserError(f"{path}:{line}: unknown key {key!r}", _nearest(key))
        if key in lines:
            raise UserError(f"{path}:{line}: {key!r} stands in line {lines[key]} already", "keep one of the two lines")
        lines[key] = line
        section = types[key_node.value]
        if not dataclasses.is_dataclass(section):
            continue
        if not isinstance(value_node, yaml.MappingNode):
            raise UserError(f"{path}:{line}: {key} cannot be {value_node.value!r}", f"give {_type_of(key)}")
        _walk(value_node, section, key + ".", path, lines)


def _check_override(word: str) -> str:
    """The key of an option, or '' for a value; raises on an unknown key."""
    if not word.startswith("--"):
        return ""
    key = word[2:].split("=", 1)[0]
    known = {name for name, *_ in _fields(Config, "")}
    if key not in known | {name.split(".")[0] for name in known} and not key.startswith("task_args."):
        raise UserError(f"unknown option --{key}", _nearest(key, dashes="--"))
    return key


def _nearest(key: str, dashes: str = "") -> str:
    known = [name for name, *_ in _fields(Config, "")]
    by_last = {name.rsplit(".", 1)[-1]: name for name in known}
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    close = close or [by_last[last] for last in difflib.get_close_matches(key.rsplit(".", 1)[-1], by_last, n=1, cutoff=0.6)]
    return f"did you mean {dashes}{close[0]}?" if close else "docs/configuration.md lists all keys"


def _parse(path: str, text: str, overrides: list[str], lines: Lines) -> Config:
    made = parser()
    try:
        sections = read_yaml(text)
        task_args = sections.pop("task_args", None) or {}
        namespace = made.parse_args(overrides, namespace=made.parse_object(sections, defaults=True))
        values = made.instantiate_classes(namespace).as_dict()
        # The parser would read quoted text ("017") as a number once more: the file's arguments stay as they stand.
        return Config(**{**values, "task_args": {**task_args, **values["task_args"]}})
    except UserError as error:
        raise UserError(_place(error.what, path, lines) + error.what, error.fix) from error
    except (argparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        raise _readable(str(error), path, lines) from error


def _readable(message: str, path: str, lines: Lines) -> UserError:
    """One sentence out of the parser's many lines."""
    keys = re.findall(r'(?:[Kk]ey|[Aa]rgument) "?-*([\w.]+)"?', message)
    value = re.search(r"(?:Given value|Got value|value): (.+)", message)
    if not keys:
        return UserError(f"{path}: {' '.join(message.split())}", "docs/configuration.md lists the keys and their types")
    name = ".".join(dict.fromkeys([keys[0], keys[-1]]))
    problem = f"{name} cannot be {value.group(1).strip()!r}" if value else f"{name} needs a value"
    return UserError(_place(name, path, lines) + problem, f"give {_type_of(name)}")


def _type_of(key: str) -> str:
    fields = list(_fields(Config, ""))
    leaf = next((kind for name, kind, *_ in fields if name == key), "")
    return leaf or f"a mapping with keys such as {next((name for name, *_ in fields if name.startswith(key + '.')), key)}"


def _place(message: str, path: str, lines: Lines) -> str:
    """``file:line: `` of the longest key that the message begins with."""
    found = [key for key in lines if re.match(re.escape(key) + r"\b", message)]
    return f"{path}:{lines[max(found, key=len)]}: " if found else ""


def _fields(kind: type, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, meaning) of every leaf."""
    types = typing.get_type_hints(kind)
    meanings = _attribute_docstrings(kind)
    for entry in dataclasses.fields(kind):
        if dataclasses.is_dataclass(types[entry.name]):
            yield from _fields(types[entry.name], f"{prefix}{entry.name}.")
            continue
        made = entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
        default = "required" if made is dataclasses.MISSING else f"`{yaml.safe_dump(_plain(made)).split(chr(10))[0]}`"
        yield prefix + entry.name, _type_name(types[entry.name]), default, meanings.get(entry.name, "")


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    plain = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    plain = plain.replace(" | None", "").replace("typing.Any", "any")
    plain = re.sub(r"tuple\[(\w+), \.\.\.\]", r"list of \1", plain)
    plain = re.sub(r"dict\[str, (\w+)\]", "mapping", plain)
    return re.sub(r"\b(str|int|float|bool)\b", lambda match: names[match.group(0)], plain)


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """The string that follows each field in the class's source."""
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        first.target.id: " ".join(second.value.value.split())
        for first, second in zip(body, body[1:], strict=False)
        if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
    }


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
