"""Finds the run that a command's argument means: a run file, a run or array folder, or checkpoints of a run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UserError
from hpctrain.run.folder import RunDir, step_named
from hpctrain.system.output import say

if TYPE_CHECKING:
    from hpctrain.config.sections import Config


def configured(target: str, overrides: Sequence[str] = ()) -> tuple[Config, RunDir]:
    """Returns the configuration and folder for a run file or run folder; the folder need not exist yet.

    Without a ``target`` the overrides give all of the configuration. A folder that is named is the run's, even if it
    was moved or copied and its run file names another one.

    Raises:
        UserError: the run file is missing or not valid.
    """
    from hpctrain.config.loading import load  # slow to import, and not needed by commands that only look at a run

    if not target:
        config = load(None, overrides, say)
        return config, RunDir.of(config.name, config.run_dir)
    path = Path(target)
    config = load(RunDir(path).run_yaml if path.is_dir() else path, overrides, say)
    run = RunDir.of(config.name, config.run_dir)
    if path.is_dir() and "--run_dir" not in {word.partition("=")[0] for word in overrides} and not _is_same(path, run):
        run = RunDir(path.absolute())
        config = dataclasses.replace(config, run_dir=str(run.path))
    return config, run


def folder(target: str) -> RunDir:
    """Returns the run folder that is meant. If a folder is named, its run file need not be valid.

    The folder need not exist yet if a run file is named.

    Raises:
        UserError: there is neither such a run folder nor such a run file.
    """
    path = Path(target).absolute()
    if not path.is_dir():
        if not path.exists():
            raise UserError(
                f"there is no run folder or run file {target}",
                "give the folder or run file of a run that has been started",
            )
        return configured(target)[1]
    run = RunDir(_of_checkpoints(path) or path)
    signs = (run.run_yaml, run.run_json, run.attempts, run.lock_file, run.events, run.checkpoints, path / "jobs.jsonl")
    if not any(sign.exists() for sign in signs) and not elements_of(run):
        raise UserError(
            f"{target} is not the folder of a run", "give the folder of a run that has been started, or a run file"
        )
    return run


def existing(target: str) -> RunDir:
    """Returns the existing folder of a run or of an array.

    Raises:
        UserError: it does not exist.
    """
    run = folder(target)
    if not run.path.is_dir():
        raise UserError(f"there is no run folder {run.path}", "start or submit the run first, or give its folder")
    return run


def single(target: str) -> RunDir:
    """Returns the folder of a single run, which need not exist yet.

    Raises:
        UserError: it is the folder of an array.
    """
    run = folder(target)
    if found := [] if run.run_json.exists() else elements_of(run):
        raise UserError(f"{run.path} is an array of runs", f"name one of them, such as {found[0].path}")
    return run


def runs(target: str) -> list[RunDir]:
    """Returns the run, or the elements of an array. Raises as ``existing``."""
    run = existing(target)
    return elements_of(run) or [run]


def elements_of(array: RunDir) -> list[RunDir]:
    """Returns the runs of an array, by index; none if this is the folder of a single run."""
    found = [path for path in array.path.glob("*/") if path.name.isdigit() and RunDir(path).run_yaml.exists()]
    return [RunDir(path) for path in sorted(found, key=lambda path: int(path.name))]


BEST = "best"
"""In place of a step: the newest checkpoint with the best value of ``checkpoint.best_metric``."""


def step(text: str) -> int | str:
    """A step as a user gives it: a number or ``best``. Raises ValueError."""
    return BEST if text == BEST else int(text)


def checkpoints(target: str) -> tuple[Path, int | None]:
    """Returns a folder of checkpoints, and the step if a single checkpoint is named.

    Args:
        target: a run file, a run folder, a folder of checkpoints, or one checkpoint's folder.
    """
    path = Path(target)
    step = step_named(path.name)
    if step is not None:
        return path.parent, step
    run = RunDir(path) if not path.is_file() else configured(target)[1]
    return (run.checkpoints if run.checkpoints.is_dir() else run.path), None


def _is_same(path: Path, run: RunDir) -> bool:
    """Whether a path leads to this run folder."""
    with contextlib.suppress(OSError):
        return path.samefile(run.path)
    return False


def _of_checkpoints(path: Path) -> Path | None:
    """Returns the run folder of a checkpoints folder or of a single checkpoint; None for other folders."""
    inside = path.parent if step_named(path.name) is not None else path
    return inside.parent if inside == RunDir(inside.parent).checkpoints else None
