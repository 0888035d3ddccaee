"""Warns about keys of ``launch`` that are set but that the engine does not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hpctrain.config.sections import LaunchConfig
from hpctrain.launch.engines.batch_systems import SYSTEMS
from hpctrain.system.output import say

BATCH = ("slurm", *SYSTEMS)
READERS = {
    "hosts": ("hosts",),
    "remote_shell": ("hosts",),
    "ticket": ("runners",),
    "node_wait_s": ("runners",),
    "launcher": ("slurm",),
    "modules": BATCH,
    "setup": BATCH,
    "stage_in": ("slurm",),
    "stage_environment": ("slurm",),
    "preflight": ("slurm",),
    "directives": tuple(SYSTEMS),
    "slurm": ("slurm",),
}
"""Engines that read a key or section, unless all read it. ``hosts`` stands for ``launch.hosts``."""


def tell(launch: LaunchConfig, engine: str) -> None:
    """Tells the user which keys are set that the engine does not read."""
    if found := list(unread(launch, engine)):
        name = {"slurm": "Slurm", "hosts": "launch.hosts"}.get(engine, f"launch.engine: {engine}")
        say(f"{', '.join(found)}: ignored with {name}")


def unread(launch: LaunchConfig, engine: str) -> Iterator[str]:
    """Yields the keys that are set and that the engine does not read; pure."""
    for key in _given(launch, LaunchConfig(), ""):
        readers = READERS.get(key) or READERS.get(key.partition(".")[0])
        noted = key == "remote_shell" and engine in SYSTEMS and launch.remote_shell == SYSTEMS[engine].remote_shell
        # ``noted``: the remote shell was set by an earlier start in the job, not by the user.
        if readers and engine not in readers and not noted:
            yield f"launch.{key}"


def _given(section: Any, usual: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        default = getattr(usual, field.name)
        if dataclasses.is_dataclass(value):
            yield from _given(value, default, f"{prefix}{field.name}.")
        elif value != default:
            yield prefix + field.name
