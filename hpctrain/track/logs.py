"""Events as records of Python's logging, for programs that have handlers for them."""

from __future__ import annotations

import logging

from hpctrain.run.events import CheckpointFailed, Event, Hang, Straggler
from hpctrain.track.console import describe

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
