"""The sinks that a run file can name. A new one: a file with its class, a line of SINKS, its key in TrackConfig."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
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
class SinkKind:
    """What a sink needs, and how it is made."""

    package: str | None
    """Its package on PyPI, which the extra of setup.cfg named like the key installs; none: the core suffices."""
    make: Callable[[TrackConfig, RunDir, str], Sink]
    """Gets the run file's section, the run folder and the run's name."""


@dataclass(frozen=True)
class Tracker:
    """A server to which a process of the module of its key sends the events."""

    title: str
    more: str = ""
    """Key of the section whose value the process gets, besides that of the tracker's own key."""


TRACKERS = {"mlflow": Tracker("MLflow", "mlflow_experiment"), "wandb": Tracker("Weights & Biases")}
"""By key of the section; ``hpctrain track sync`` sends to them, too."""


def _follower(key: str) -> SinkKind:
    title, more = TRACKERS[key].title, TRACKERS[key].more
    return SinkKind(
        key,
        lambda track, run_dir, name: FollowerSink(key, title, run_dir, getattr(track, key), getattr(track, more, "")),
    )


SINKS = {
    "tensorboard": SinkKind("tensorboardX", lambda track, run_dir, name: TensorBoardSink(run_dir.path / "tensorboard")),
    **{key: _follower(key) for key in TRACKERS},
    "prometheus": SinkKind(
        "prometheus-client", lambda track, run_dir, name: PrometheusSink(track.prometheus or "", name)
    ),
}
"""By key of the section ``track`` that turns it on."""


def make_sinks(track: TrackConfig, run_dir: RunDir, name: str) -> Iterator[Sink]:
    """The console, logging, and the sinks that a run file names, for the run of this name; on rank 0.

    Raises:
        MissingExtra: a sink's package is not installed.
    """
    for error in missing_extras(track):
        raise error
    yield from (make_console(shown_columns()), LoggingSink())
    yield from (SINKS[key].make(track, run_dir, name) for key in _named(track))


def missing_extras(track: TrackConfig) -> Iterator[MissingExtra]:
    """An error for each named sink whose package is not installed."""
    for key in _named(track):
        package = SINKS[key].package
        if package and importlib.util.find_spec(package.replace("-", "_")) is None:
            yield MissingExtra(package, key)


def _named(track: TrackConfig) -> Iterator[str]:
    return (key for key in SINKS if getattr(track, key))


LOGGER = logging.getLogger("hpctrain.run")
WARNINGS = (CheckpointFailed, Hang, Straggler)


class LoggingSink:
    """Records of the logger ``hpctrain.run``, whose attribute ``event`` has all fields.

    Those that the console shows have the level INFO, all others DEBUG, and what goes wrong has WARNING.
    """

    def event(self, event: Event) -> None:
        line = describe(event)
        level = logging.WARNING if isinstance(event, WARNINGS) else logging.INFO if line else logging.DEBUG
        if LOGGER.isEnabledFor(level):
            fields = event.to_json()
            LOGGER.log(level, "%s", line or f"{event.name} at step {event.step}", extra={"event": fields})

    def close(self) -> None:
        """See Sink."""
