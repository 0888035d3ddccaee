"""The run that a person's argument names: a run file, a run folder, an array's, its checkpoints or one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UserError
from hpctrain.run.folder import RunDir, step_named
from hpctrain.system.output import say

if TYPE_CHECKING:
    from hpctrain.config.sections import Config


def configured(target: str, overrides: Sequence[str] = ()) -> tuple[Config, RunDir]:
    """The configuration and folder behind a run file or a run folder; the folder need not be there yet.

    Raises:
        UserError: the run file is missing or not valid.
    """
    from hpctrain.config.loading import load  # takes its time, and looking on needs none of it

    path = Path(target)
    config = load(RunDir(path).run_yaml if path.is_dir() else path, overrides, say)
    if path.is_dir() and not config.run_dir:
        return config, RunDir(path.absolute())
    return config, RunDir.of(config.name, config.run_dir)


def folder(target: str) -> RunDir:
    """The run folder that is meant, which need not be there yet; for looking on, its run file need not be valid.

    Raises:
        UserError: there is neither such a folder nor such a run file.
    """
    path = Path(target).absolute()
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"there is no run folder or run file {target}", "give one of a run that was started")
        return configured(target)[1]
    run = RunDir(_of_checkpoints(path) or path)
    signs = (run.run_yaml, run.run_json, run.attempts, run.lock_file, run.events, run.checkpoints, path / "jobs.jsonl")
    if not any(sign.exists() for sign in signs) and not elements_of(run):
        raise UserError(f"{target} is not the folder of a run", "give one of a run that was started, or a run file")
    return run


def existing(target: str) -> RunDir:
    """The run folder that is meant, of one run or of an array.

    Raises:
        UserError: it is not there.
    """
    run = folder(target)
    if not run.path.is_dir():
        raise UserError(f"there is no run folder {run.path}", "start or submit the run first, or give its folder")
    return run


def single(target: str) -> RunDir:
    """The folder of one run, which need not be there yet.

    Raises:
        UserError: it is that of an array.
    """
    run = folder(target)
    if found := [] if run.run_json.exists() else elements_of(run):
        raise UserError(f"{run.path} is an array of runs", f"name one of them, such as {found[0].path}")
    return run


def runs(target: str) -> list[RunDir]:
    """The run, or the elements of an array. Raises as ``existing``."""
    run = existing(target)
    return elements_of(run) or [run]


def elements_of(array: RunDir) -> list[RunDir]:
    """The runs of an array, by index; none if this is the folder of one run."""
    found = [path for path in array.path.glob("*/") if path.name.isdigit() and RunDir(path).run_yaml.exists()]
    return [RunDir(path) for path in sorted(found, key=lambda path: int(path.name))]


def checkpoints(target: str) -> tuple[Path, int | None]:
    """The folder of checkpoints, wherever it lies, and the step of the one that is named, if one is.

    Args:
        target: a run file, a run folder, a folder of checkpoints, or one checkpoint's folder.
    """
    path = Path(target)
    step = step_named(path.name)
    if step is not None:
        return path.parent, step
    run = RunDir(path) if not path.is_file() else configured(target)[1]
    return (run.checkpoints if run.checkpoints.is_dir() else run.path), None


def _of_checkpoints(path: Path) -> Path | None:
    """The run folder that checkpoints, or one of them, lie in; None for other folders."""
    inside = path.parent if step_named(path.name) is not None else path
    return inside.parent if inside == RunDir(inside.parent).checkpoints else None
