"""The sinks that a run file can name. To add one: a file with its class, a line in PACKAGES, a key in TrackConfig."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.config.sections import TrackConfig
from hpctrain.errors import MissingExtra
from hpctrain.run.events import CheckpointFailed, Event, Hang, Straggler
from hpctrain.run.folder import RunDir
from hpctrain.system.output import shown_columns
from hpctrain.track.console import describe, make_console
from hpctrain.track.follower import FollowerSink
from hpctrain.track.prometheus import PrometheusSink
from hpctrain.track.sink import Sink
from hpctrain.track.tensorboard import TensorBoardSink


@dataclass(frozen=True)
class Tracker:
    """A server to which a process (the module named like its key) sends the events."""

    title: str
    more: str = ""
    """Key of the section whose value the process also gets."""


TRACKERS = {"mlflow": Tracker("MLflow", "mlflow_experiment"), "wandb": Tracker("Weights & Biases")}
"""Trackers by key of the section; ``hpctrain track sync`` also sends to them."""
PACKAGES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb", "prometheus": "prometheus-client"}
"""The PyPI package that a key of the section needs, which the extra of the same name installs."""


def make_sinks(track: TrackConfig, run_dir: RunDir, name: str) -> Iterator[Sink]:
    """Makes the console, the logging sink and the sinks that the run file names; on rank 0.

    Raises:
        MissingExtra: a sink's package is not installed.
    """
    for error in missing_extras(track):
        raise error
    yield from (make_console(shown_columns()), LoggingSink())
    if track.tensorboard:
        yield TensorBoardSink(run_dir.path / "tensorboard")
    for key, tracker in TRACKERS.items():
        if uri := getattr(track, key):
            yield FollowerSink(key, tracker.title, run_dir, uri, getattr(track, tracker.more, ""))
    if track.prometheus:
        yield PrometheusSink(track.prometheus, name)


def missing_extras(track: TrackConfig) -> Iterator[MissingExtra]:
    """Yields an error for each named sink whose package is not installed."""
    for key, package in PACKAGES.items():
        if getattr(track, key) and importlib.util.find_spec(package.replace("-", "_")) is None:
            yield MissingExtra(package, key)


LOGGER = logging.getLogger("hpctrain.run")
WARNINGS = (CheckpointFailed, Hang, Straggler)


class LoggingSink:
    """Logs events to ``hpctrain.run``; the attribute ``event`` of a record has all fields.

    Failures have level WARNING, events shown on the console INFO, all others DEBUG.
    """

    def event(self, event: Event) -> None:
        line = describe(event)
        level = logging.INFO if line else logging.DEBUG
        if isinstance(event, WARNINGS):
            level = logging.WARNING
        if LOGGER.isEnabledFor(level):
            fields = event.to_json()
            LOGGER.log(level, "%s", line or f"{event.name} at step {event.step}", extra={"event": fields})

    def close(self) -> None:
        """See Sink."""
