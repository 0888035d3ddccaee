"""Run files: YAML and command-line overrides to a Config, and back, with errors that name the file, line and key."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpctrain.config.reference import leaves
from hpctrain.config.sections import Config
from hpctrain.errors import UserError
from hpctrain.system import bounded_yaml, safe_read

Lines = dict[str, int]
"""Line, from 1, of each dotted key of a run file."""


class RunFileLoader(bounded_yaml.BoundedLoader):
    """YAML with the scalars of version 1.2: ``off`` and ``01:30:00`` are text, ``1e-4`` is a number."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way; filled below)


for _tag, _pattern, _first in [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
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
    try:
        lines = _check_keys(text, str(path))
        sections = read_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        fix = "correct the line (indentation, quotes, colons, aliases)"
        raise UserError(f"{path}{line} is not YAML: {error.problem}", fix) from error
    except yaml.YAMLError as error:  # control characters
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}", "write plain text") from error
    for word in overrides:
        lines.pop(_check_override(word), None)
    return _parse(str(path), sections, list(overrides), lines)


def dump(config: Config) -> str:
    """The YAML text that ``load`` reads back to an equal Config."""
    values = _plain(dataclasses.asdict(config))
    return yaml.dump(values, Dumper=RunFileDumper, sort_keys=False, width=100)


def read_yaml(text: str) -> Any:
    """The plain values of a YAML text."""
    return bounded_yaml.parse(text, RunFileLoader)


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that takes a run file: the file, and any key of it as an option."""
    parser.add_argument("run_file", help="YAML run file")
    parser.set_defaults(overrides=[])


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


def _read(path: Path) -> str:
    try:
        return safe_read.read(path, bounded_yaml.MOST_BYTES).decode()
    except FileNotFoundError as error:
        raise UserError(f"run file {path} does not exist", "give the path of a YAML run file") from error
    except safe_read.TooLarge as error:
        fix = "put what is large into a file of its own, and its name into task_args"
        raise UserError(f"run file {path} is too large: {error.strerror}", fix) from error
    except OSError as error:
        raise UserError(f"run file {path} cannot be read: {error.strerror}", "give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"run file {path} cannot be read: {error}", "give a YAML file in UTF-8") from error


def _check_keys(text: str, path: str) -> Lines:
    """Lines of all keys; raises on unknown keys and on keys that stand twice."""
    root = yaml.compose(text, Loader=RunFileLoader)
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no keys", "begin with name: and task:")
    lines: Lines = {}
    _walk(root, Config, "", path, lines)
    return lines


def _walk(node: yaml.MappingNode, kind: type, prefix: str, path: str, lines: Lines) -> None:
    types = typing.get_type_hints(kind)
    for key_node, value_node in node.value:
        name = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
        key, line = prefix + name, key_node.start_mark.line + 1
        if name not in types:
            raise UserError(f"{path}:{line}: unknown key {key!r}", _nearest(key))
        if key in lines:
            raise UserError(f"{path}:{line}: {key!r} stands in line {lines[key]} already", "keep one of the two lines")
        lines[key] = line
        if not dataclasses.is_dataclass(types[name]):
            continue
        if not isinstance(value_node, yaml.MappingNode):
            raise UserError(f"{path}:{line}: {key} cannot be {value_node.value!r}", f"give {_type_of(key)}")
        _walk(value_node, types[name], key + ".", path, lines)


def _check_override(word: str) -> str:
    """The key of an option, or '' for a value; raises on an unknown key."""
    if not word.startswith("--"):
        return ""
    key = word[2:].split("=", 1)[0]
    known = leaves().keys() | {name.split(".")[0] for name in leaves()}
    if key.startswith("task_args.") and key.count(".") > 1:
        whole = key[: key.index(".", len("task_args."))]
        raise UserError(f"--{key} names a part of an argument", f"give the whole one: --{whole} '{{...}}'")
    if key not in known and not key.startswith("task_args."):
        raise UserError(f"unknown option --{key}", _nearest(key, dashes="--"))
    return key


def _nearest(key: str, dashes: str = "") -> str:
    known = list(leaves())
    known += sorted({name.rpartition(".")[0] for name in known} - {""})  # sections
    by_last = {name.split(".")[-1]: name for name in known}
    close = difflib.get_close_matches(key, known, n=1)
    close = close or [by_last[last] for last in difflib.get_close_matches(key.split(".")[-1], by_last, n=1)]
    return f"did you mean {dashes}{close[0]}?" if close else "docs/configuration.md lists all keys"


def _parse(path: str, sections: dict[str, Any], overrides: list[str], lines: Lines) -> Config:
    made = parser()
    try:
        task_args = sections.pop("task_args", None) or {}
        namespace = made.parse_args(overrides, namespace=made.parse_object(sections, defaults=True))
        # The parser reads quoted text ("null", "017") once more: what the file quotes stays as it stands.
        for key, text in _texts(sections):
            if key in lines and namespace[key] is None and leaves()[key].type == "text":
                namespace[key] = text
        values = made.instantiate(namespace).as_dict()
        return Config(**{**values, "task_args": {**task_args, **values["task_args"]}})
    except UserError as error:
        raise UserError(_place(error.what, path, lines) + error.what, error.fix) from error
    except (argparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        raise _readable(str(error), path, lines) from error


def _texts(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a run file whose values are text, and these."""
    for name, value in section.items():
        if isinstance(value, str):
            yield prefix + name, value
        elif isinstance(value, dict) and prefix + name not in leaves():
            yield from _texts(value, f"{prefix}{name}.")


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
    known = leaves()
    example = next((name for name in known if name.startswith(key + ".")), key)
    return known[key].type if key in known else f"a mapping with keys such as {example}"


def _place(message: str, path: str, lines: Lines) -> str:
    """``file:line: `` of the longest key that the message begins with."""
    found = [key for key in lines if re.match(re.escape(key) + r"(?![\w.])", message)]
    return f"{path}:{lines[max(found, key=len)]}: " if found else ""


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
