"""The owner of the run folder: its files and their writers, and the one view that tells how a run stands.

``view`` is for everybody who wants to know; ``events``, ``attempt_record``, ``last_words`` and ``verdict`` are what it
tells; ``folder`` knows the places of files, ``live_lock`` who works on them, ``which`` the run that a person means. The
names below are for other rooms; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.run.attempt_record import Attempt
    from hpctrain.run.event_log import EventWriter
    from hpctrain.run.history import RunHistory, Series
    from hpctrain.run.progress import Progress, Warned
    from hpctrain.run.snapshot import LiveRank, LiveWindow, RunSnapshot
    from hpctrain.run.standing import ORDERLY, Outcome, State, Word
    from hpctrain.run.view import RunView

_MODULES = {
    "Attempt": "attempt_record",
    "EventWriter": "event_log",
    "LiveRank": "snapshot",
    "LiveWindow": "snapshot",
    "ORDERLY": "standing",
    "Outcome": "standing",
    "Progress": "progress",
    "RunHistory": "history",
    "RunSnapshot": "snapshot",
    "RunView": "view",
    "Series": "history",
    "State": "standing",
    "Warned": "progress",
    "Word": "standing",
}

__all__ = [
    "ORDERLY",
    "Attempt",
    "EventWriter",
    "LiveRank",
    "LiveWindow",
    "Outcome",
    "Progress",
    "RunHistory",
    "RunSnapshot",
    "RunView",
    "Series",
    "State",
    "Warned",
    "Word",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.run' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.run.{_MODULES[name]}"), name)
