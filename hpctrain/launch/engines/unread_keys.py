"""Warns about keys of ``launch`` that are set but that the engine does not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from hpctrain.config.sections import LaunchConfig
from hpctrain.launch.engines.batch_systems import SYSTEMS
from hpctrain.system.json_shape import flat
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
    defaults = flat(asdict(LaunchConfig()))
    for key, value in flat(asdict(launch)).items():
        readers = READERS.get(key.partition(".")[0])
        noted = key == "remote_shell" and engine in SYSTEMS and value == SYSTEMS[engine].remote_shell
        # ``noted``: the remote shell was set by an earlier start in the job, not by the user.
        if value != defaults.get(key) and readers and engine not in readers and not noted:
            yield f"launch.{key}"
