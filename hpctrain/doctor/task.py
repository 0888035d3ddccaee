"""A run file: whether it can be read, and whether what it names is there. Runs none of the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpctrain.config.loading import load
from hpctrain.config.sections import Config, TrackConfig
from hpctrain.doctor.probe import Check, problem
from hpctrain.errors import UserError
from hpctrain.system import python
from hpctrain.track.sinks import missing_extras


def findings(path: str) -> tuple[Config | None, list[Check]]:
    """The configuration, none if it cannot be read, and what is to be said of it."""
    try:
        config = load(path)
    except UserError as error:
        return None, [problem("run file", error.what, error.fix)]
    return config, [Check("run file", path), *sinks(config.track), *task(config.task)]


def sinks(track: TrackConfig) -> list[Check]:
    """Packages of sinks that the run file names and that are not installed."""
    return [problem("track", error.what, error.fix) for error in missing_extras(track)]


def task(name: str) -> Iterator[Check]:
    """Whether the module or file of a task is there."""
    if not name:
        return
    module, _, _ = name.rpartition(":")
    if module.endswith(".py"):
        if not Path(module).is_file():
            yield problem("task", f"{module} does not exist", "paths are relative to the folder you start hpctrain in")
            return
    elif not python.is_there(module):
        yield problem("task", f"no module {module}", "install its package, or start hpctrain where it can be imported")
        return
    yield Check("task", name)
