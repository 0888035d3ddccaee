"""Run files: YAML and command-line overrides to a Config, and back, with errors that name the file, line and key."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from hpctrain.config.combinations import Refused
from hpctrain.config.reference import keys, sections
from hpctrain.config.sections import DECISIVE, ONE_OF, Config, WrongValue, is_given
from hpctrain.config.values import (
    Misfit,
    RunFileDumper,
    RunFileLoader,
    converted,
    of_word,
    refuse_credentials,
    to_give,
    unquoted,
)
from hpctrain.errors import UserError
from hpctrain.system import bounded_yaml, safe_read

ACCEPT = "accept"
"""An option that adds to checkpoint.accept: ``--accept train.epochs``."""
SLURM = "launch.slurm."


def load(
    path: str | Path | None, overrides: Sequence[str] = (), tell: Callable[[str], object] = lambda text: None
) -> Config:
    """Reads a run file.

    Args:
        path: YAML file with the sections of ``Config``; none if the overrides say everything.
        overrides: command-line words such as ``["--train.epochs", "3", "--name=long"]``; they win over the file, also
            over a key of it that excludes theirs.
        tell: gets a sentence for each key of the file that is overridden in this way.

    Raises:
        UserError: no such file, not YAML, an unknown key, a wrong type or a value out of range.
    """
    values, lines = _read_file(Path(path)) if path is not None else ({}, {})
    in_file = dict(values)
    arguments: dict[str, typing.Any] = {}
    accepted: list[str] = []
    for key, value in _read_words(overrides):
        if key == ACCEPT:
            accepted.append(value)
            continue
        argument = key.removeprefix("task_args.")
        if argument != key:
            arguments[argument] = value
        elif key == "task_args" and isinstance(value, dict):
            arguments |= value
        else:
            values[key] = value
            in_file.pop(key, None)
            lines.pop(key, None)
    for key, winner in giving_way(in_file, values):
        del values[key]
        tell(f"--{winner} overrides {key} in {path}")
    if accepted:
        values["checkpoint.accept"] = accepted
    try:
        config: Config = _make(Config, "", values)
    except (WrongValue, Refused) as error:
        wrong = [error.key] if isinstance(error, WrongValue) else [one.partition(":")[0] for one in error.row.features]
        places = [f"{path}:{lines[key]}: " for key in wrong if key in lines]
        raise UserError("".join(places[:1]) + error.what, error.fix) from error
    refuse_unknown_accepted(config.checkpoint.accept)
    return dataclasses.replace(config, task_args=config.task_args | arguments) if arguments else config


def refuse_unknown_accepted(accepted: Sequence[str]) -> None:
    """Raises UserError for what no run can differ in; keys of earlier versions are left to their section."""
    roots = (*DECISIVE, "state", "model")
    for key in accepted:
        if key not in keys() and key not in sections() and not f"{key}.".startswith(tuple(f"{one}." for one in roots)):
            raise UserError(f"checkpoint.accept names {key!r}, which is not a key of the run file", _nearest(key))


def giving_way(in_file: Mapping[str, typing.Any], values: Mapping[str, typing.Any]) -> Iterator[tuple[str, str]]:
    """Keys that only the file gives, each with the key of the command line that excludes it."""
    for pair in ONE_OF:
        for key, winner in ((pair.first, pair.second), (pair.second, pair.first)):
            if is_given(in_file.get(key)) and winner not in in_file and is_given(values.get(winner)):
                yield key, winner


def dump(config: Config) -> str:
    """The YAML text that ``load`` reads back to an equal Config."""
    return yaml.dump(dataclasses.asdict(config), Dumper=RunFileDumper, sort_keys=False, width=100)


def absolute_task(task: str) -> str:
    """The task by a name that means the same in every folder."""
    module, colon, function = task.partition(":")
    return f"{Path(module).absolute()}{colon}{function}" if module.endswith(".py") else task


def add_run_file(parser: argparse.ArgumentParser, help: str = "YAML run file", nargs: str | None = None) -> None:
    """The arguments of every command that takes a run file: the file, and any key of it as an option."""
    parser.add_argument("run_file", help=help, nargs=nargs)
    parser.set_defaults(overrides=[])


def _read_file(path: Path) -> tuple[dict[str, typing.Any], dict[str, int]]:
    """The values and lines, from 1, of all keys, dotted; raises on unknown ones and on those that stand twice."""
    lines: dict[str, int] = {}
    if path.suffix == ".py":
        fix = f"run a program with hpctrain run -- python {path}; hpctrain init NAME writes a task with its run file"
        raise UserError(f"{path} is a Python program, and a run file is YAML", fix)
    try:
        loader = RunFileLoader(safe_read.read(path, bounded_yaml.MOST_BYTES).decode())
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path} holds no keys", "begin with name: and task:")
        nodes = dict(_nodes(root, "", path, lines))
        return {key: loader.construct_object(node, deep=True) for key, node in nodes.items()}, lines
    except FileNotFoundError as error:
        program = "" if path.suffix else f"; a program follows two dashes: hpctrain run -- {path} ..."
        raise UserError(f"run file {path} does not exist", f"give the path of a YAML run file{program}") from error
    except safe_read.TooLarge as error:
        fix = "put large values into a separate file, and its name into task_args"
        raise UserError(f"run file {path} is too large: {error.strerror}", fix) from error
    except OSError as error:
        raise UserError(f"run file {path} cannot be read: {error.strerror}", "give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"run file {path} cannot be read: {error}", "give a YAML file in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        fix = "correct the line (indentation, quotes, colons, aliases)"
        raise UserError(f"{path}{line} is not YAML: {error.problem}", fix) from error
    except (yaml.YAMLError, ValueError, TypeError, KeyError) as error:  # control characters, tags that fit no value
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}", "write plain text") from error


def _nodes(
    section: yaml.MappingNode, prefix: str, path: Path, lines: dict[str, int]
) -> Iterator[tuple[str, yaml.Node]]:
    """The keys that hold a value, with it; enters all keys in ``lines``."""
    for key_node, node in section.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in lines:
            raise UserError(f"{path}:{line}: {key!r} is in line {lines[key]} already", "keep one of the two lines")
        lines[key] = line
        if key in keys():
            yield key, node
        elif key not in sections():
            raise UserError(f"{path}:{line}: unknown key {key!r}", _nearest(key))
        elif isinstance(node, yaml.MappingNode):
            yield from _nodes(node, f"{key}.", path, lines)
        else:
            raise UserError(f"{path}:{line}: {key} cannot be {node.value!r}", f"give {_type_of(key)}")


def _read_words(overrides: Sequence[str]) -> Iterator[tuple[str, typing.Any]]:
    """Keys and values of options; raises on unknown ones."""
    words = iter(overrides)
    for option in words:
        key, equals, word = option.removeprefix("--").partition("=")
        if not option.startswith("--"):
            raise UserError(f"{option!r} is not an option", "write --key value, with a key of the run file")
        argument, _, part = key.removeprefix("task_args.").partition(".")
        of_task = key.startswith("task_args.")
        if of_task and part:
            whole = f"--task_args.{argument}"
            raise UserError(f"--{key} names a part of an argument", f"give the whole one: {whole} '{{...}}'")
        if key not in keys() and key != ACCEPT and not (of_task and argument):
            raise UserError(f"unknown option --{key}", _nearest(key, dashes="--"))
        if not equals:
            word = next(words, "--")
        if not equals and word.startswith("--"):
            raise UserError(f"{key} needs a value", f"give {_type_of('name' if key == ACCEPT else key)}")
        if key == ACCEPT:
            yield key, word
        else:
            yield key, of_word(word, keys()[key].kind if key in keys() else typing.Any)


def _make(section: type, prefix: str, given: Mapping[str, typing.Any]) -> typing.Any:
    """The section, of what is given in it; its own defaults fill the rest."""
    values, kinds = {}, typing.get_type_hints(section)
    for name in (entry.name for entry in dataclasses.fields(section)):
        key, kind = prefix + name, kinds[name]
        if dataclasses.is_dataclass(kind):
            values[name] = _make(typing.cast(type, kind), f"{key}.", given)
        elif key in given:
            try:
                values[name] = converted(unquoted(given[key], kind), kind)
            except Misfit as misfit:
                shown = misfit.value if isinstance(misfit.value, str) else json.dumps(misfit.value, default=str)
                refuse_credentials(shown, key)
                example = f": [{shown}]" if typing.get_origin(kind) is tuple and misfit.value == given[key] else ""
                raise WrongValue(key, f"{key} cannot be {shown!r}", f"give {_type_of(key)}{example}") from misfit
        elif keys()[key].default is None:
            raise WrongValue(key, f"{key} is missing", f"give {_type_of(key)}")
    return section(**values)


def _type_of(key: str) -> str:
    """What a key or section takes, in words."""
    example = next((name for name in keys() if name.startswith(f"{key}.")), key)
    return to_give(keys()[key].kind) if key in keys() else f"a mapping with keys such as {example}"


def _nearest(key: str, dashes: str = "") -> str:
    """What was probably meant by an unknown key: one of its name, of a similar one, or that shares a word with it."""
    known = list(keys()) if dashes else [*keys(), *sections()]
    otherwise = "docs/configuration.md lists all keys"
    if key.startswith(SLURM):  # nothing in other sections is meant by Slurm's words
        key, dashes, otherwise = key.removeprefix(SLURM), dashes + SLURM, f"{SLURM}extra takes further directives"
        known = [name.removeprefix(SLURM) for name in known if name.startswith(SLURM)]
    section, _, last = key.rpartition(".")
    parts = {name: name.rpartition(".") for name in known}
    same_last = [name for name, (_, _, end) in parts.items() if end == last]
    by_last = {end: name for name, (_, _, end) in parts.items()}
    beside = {name: end.split("_") for name, (home, _, end) in parts.items() if home == section}
    for close in (
        difflib.get_close_matches(key, same_last, n=1, cutoff=0),
        difflib.get_close_matches(key, known, n=1),
        [by_last[end] for end in difflib.get_close_matches(last, by_last, n=1)],
        [name for name, words in beside.items() if {*words} & {*last.split("_")}],
    ):
        if close:
            return f"did you mean {dashes}{close[0]}?"
    return otherwise
