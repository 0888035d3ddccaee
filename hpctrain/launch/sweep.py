"""Sweeps: one run for each combination of option values, each in its own folder below the sweep's."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.config.loading import absolute_task, load
from hpctrain.config.sections import Config
from hpctrain.errors import UserError
from hpctrain.run import resolve_run
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import Word
from hpctrain.run.run_view import RunView
from hpctrain.system.output import say

NO_AXIS = "launch.slurm."
"""Prefix of keys whose values may contain commas (several partitions, for example), so are not split."""
CONTINUES = ("train.epochs", "train.steps", "launch.", "checkpoint.", "monitor.", "track.")
"""Prefixes of keys that do not change a run's identity: with other values it continues in its folder."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    config: Config
    """The run's configuration, with the point's own name and folder."""
    values: tuple[tuple[str, Any], ...]
    """Swept keys and their values."""

    @property
    def run(self) -> RunDir:
        """The run folder."""
        return RunDir.of(self.config.name, self.config.run_dir)

    @property
    def label(self) -> str:
        """The swept values as text, such as ``optimizer.lr 0.001, seed 2``."""
        return ", ".join(f"{key} {value}" for key, value in self.values)

    def is_finished(self) -> bool:
        """Whether an earlier call has finished it with the same ``train`` section."""
        if RunView(self.run.path).snapshot().outcome.word is not Word.FINISHED:
            return False
        return load(self.run.run_yaml).train == self.config.train


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields command-line options and their values, given as ``--option=value`` or ``--option value``."""
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        yield option, value if equals else next(rest, "")


def split(text: str) -> list[str]:
    """Splits text at commas, except inside brackets or braces: a list or mapping is one value."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values


def combinations(words: Sequence[str], lists: Sequence[str] = ()) -> list[list[str]]:
    """Returns the options of each point: all combinations of comma-separated values, crossed with the files' lines.

    Args:
        words: options such as ``--optimizer.lr 1e-3,3e-4``.
        lists: files with one point's options per line.

    Raises:
        UserError: a file cannot be read, or has no options.
    """
    axes = []
    for option, value in options_of(words):
        values = [value] if option.removeprefix("--").startswith(NO_AXIS) else split(value)
        axes.append([[f"{option}={each}"] for each in values])
    lines = [line for file in lists for line in lines_of(file)] if lists else [[]]
    return [list(itertools.chain.from_iterable(point)) for point in itertools.product(*axes, lines)]


def lines_of(file: str) -> list[list[str]]:
    """Returns the options on each line of a file, without comments and empty lines. Raises UserError."""
    fix = "give a file with one line of options a run, such as --seed 3 --train.epochs 10"
    try:
        found = [shlex.split(line, comments=True) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a quotation that is not closed
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or error}", fix) from error
    if not any(found):
        raise UserError(f"{file} names no runs", fix)
    return [words for words in found if words]


def elements(run_file: str, overrides: Sequence[str], words: Sequence[str]) -> list[Config]:
    """Returns the runs of ``--array``: all combinations of ``key=v1,v2``, crossed with the lines of any files.

    Raises:
        UserError: see ``combinations`` and ``points_of``.
    """
    lists = [word for word in words if "=" not in word or os.path.exists(word)]  # no OSError if too long for a path
    axes = [f"--{word.removeprefix('--')}" for word in words if word not in lists]
    points = [[*overrides, *options] for options in combinations(axes, lists)]
    return [point.config for point in points_of(run_file, points, moves=False)] if words else []


def points_of(run_file: str, options: Sequence[Sequence[str]], moves: bool = True) -> list[Point]:
    """Returns the points, each in the folder that an earlier call gave it, or in the next free one.

    Args:
        run_file: the run file.
        options: the overrides of each point.
        moves: if there is a single run of the sweep's name, and no point, whether the sweep's name is that with
            ``-sweep``. Not for job arrays, whose scripts name the folder.

    Raises:
        UserError: a point is not a valid run, two are the same, name or run_dir is swept, or the sweep's folder
            belongs to a single run all the same.
    """
    configs = [load(run_file, words, say if index == 0 else lambda text: None) for index, words in enumerate(options)]
    named = dict.fromkeys(option.removeprefix("--") for words in options for option, _ in options_of(words))
    keys = [key for key in named if any(value_of(one, key) != value_of(configs[0], key) for one in configs)]
    name, run_dir = configs[0].name, configs[0].run_dir
    single = RunDir.of(name, run_dir)
    if moves and single.has_begun and not resolve_run.elements_of(single):
        name, run_dir = f"{name}-sweep", run_dir and f"{run_dir}-sweep"
    parent = RunDir.of(name, run_dir)
    if parent.has_begun or any(key in ("name", "run_dir") for key in keys):
        what = f"{parent.path} is the folder of a single run" if parent.has_begun else "a sweep has one name and folder"
        raise UserError(what, "give the sweep another name: --name NAME")
    swept = [key for key in keys if key.startswith(CONTINUES)]
    earlier = {int(each.path.name): load(each.run_yaml) for each in resolve_run.elements_of(parent)}
    free = iter(sorted(set(range(len(earlier) + len(configs))) - earlier.keys()))
    known = [(at, identity_of(old, swept)) for at, old in earlier.items()]
    points: list[Point] = []
    for config in configs:
        values = tuple((key, value_of(config, key)) for key in keys)
        if any(point.values == values for point in points):
            shown = ", ".join(f"{key} {value_of(config, key)}" for key in keys or named)
            raise UserError(f"two points of the sweep are the same: {shown}", "give each value once")
        identity = identity_of(config, swept)
        index = next((at for at, other in known if other == identity), None)
        index = next(free) if index is None else index
        own = dataclasses.replace(config, name=f"{name}-{index}", run_dir=str(parent.path / str(index)))
        points.append(Point(own, values))
    return points


def identity_of(config: Config, swept: Sequence[str]) -> Any:
    """Returns what identifies a run: its configuration without name, folder, and the CONTINUES keys not swept."""
    task = absolute_task(config.task)
    values = dataclasses.asdict(dataclasses.replace(config, name="point", run_dir=None, task=task))
    for section in ("checkpoint", "monitor", "track"):
        values.pop(section)
    values["launch"] = config.launch.command
    values["train"] |= {"epochs": None, "steps": None}
    return values, [value_of(config, key) for key in swept]


def value_of(config: Config, key: str) -> Any:
    """Returns a run's value for a dotted key; None if it has none."""
    section, _, argument = key.partition(".")
    if section == "task_args" and argument:
        return config.task_args.get(argument)
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value
