"""Writes a text file for the textfile collector of a Prometheus node exporter."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from hpctrain.run.events import Event, RunFinished
from hpctrain.track.sink import scalars

HELP = {
    "step": "updates done",
    "attempt": "attempt of the run",
    "time": "Unix seconds of the newest event",
    "finished": "1 when the attempt has ended in order",
}


class PrometheusSink:
    """Replaces the file at each event; a full disk or a missing folder does not end the run."""

    def __init__(self, path: str, run: str) -> None:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

        self.path, self.run = path, run
        self.registry = CollectorRegistry()
        self.make: Callable[[str], Any] = lambda name: Gauge(
            name, HELP.get(name, name), ["run"], namespace="hpctrain", registry=self.registry
        )
        self.write = write_to_textfile
        self.gauges: dict[str, Any] = {}

    def event(self, event: Event) -> None:
        values = {"step": event.step, "attempt": event.attempt, "time": event.time, **scalars(event)}
        values["finished"] = float(isinstance(event, RunFinished))
        for name, value in values.items():
            plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)  # characters that every exporter accepts
            if plain not in self.gauges:
                self.gauges[plain] = self.make(plain)
            self.gauges[plain].labels(self.run).set(value)
        with contextlib.suppress(OSError):
            self.write(self.path, self.registry)

    def close(self) -> None:
        """See Sink; the file keeps the last values."""
