"""The owner of the run folder: its files and their writers, and the one view that says how a run stands.

``view`` is for everybody who wants to know, and ``events``, ``attempt_record``, ``last_words`` and ``verdict`` are what
it tells; ``which`` finds the run that a person means. ``folder`` names the files, ``attempts`` keeps run.json and the
fence, ``live_lock`` lets one live run in, ranks leave ``last_words``, of which ``decision`` makes a verdict,
``stop_request`` is the STOP file. ``rank_environment`` holds the variables that ranks start with, ``provenance`` what
they run; ``bad_nodes`` are those to leave out.
``figures`` are the curves and matrices of metrics, ``grid`` has the places of ranks that share out a model, and
``plans`` are the ways to do so that ``hpctrain plan`` has told.
``logs``, ``pictures`` and ``deaths`` (noted by the monitor) read what lies there, ``step_folder`` names the
folders of checkpoints, ``word_reader`` looks at last words again and again, and ``job`` is a scheduler's job. The names
below are for other rooms; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.run.attempt_record import Attempt
    from hpctrain.run.attempts import Attempts
    from hpctrain.run.decision import decide
    from hpctrain.run.event_log import EventWriter
    from hpctrain.run.folder import RunDir
    from hpctrain.run.history import RunHistory, Series
    from hpctrain.run.last_words import AttemptWords, Ending, ErrorWord, LastWord
    from hpctrain.run.live_lock import LiveLock
    from hpctrain.run.progress import Progress, Warned
    from hpctrain.run.snapshot import LiveRank, LiveWindow, RunSnapshot
    from hpctrain.run.standing import ORDERLY, Outcome, State, Word
    from hpctrain.run.stop_request import StopRequest, request_stop, requested_stop
    from hpctrain.run.verdict import Action, Stop, Verdict
    from hpctrain.run.view import RunView

_MODULES = {
    "Action": "verdict",
    "Attempt": "attempt_record",
    "AttemptWords": "last_words",
    "Attempts": "attempts",
    "Ending": "last_words",
    "ErrorWord": "last_words",
    "EventWriter": "event_log",
    "LastWord": "last_words",
    "LiveLock": "live_lock",
    "LiveRank": "snapshot",
    "LiveWindow": "snapshot",
    "ORDERLY": "standing",
    "Outcome": "standing",
    "Progress": "progress",
    "RunDir": "folder",
    "RunHistory": "history",
    "RunSnapshot": "snapshot",
    "RunView": "view",
    "Series": "history",
    "State": "standing",
    "Stop": "verdict",
    "StopRequest": "stop_request",
    "Verdict": "verdict",
    "Warned": "progress",
    "Word": "standing",
    "decide": "decision",
    "request_stop": "stop_request",
    "requested_stop": "stop_request",
}

__all__ = [
    "ORDERLY",
    "Action",
    "Attempt",
    "AttemptWords",
    "Attempts",
    "Ending",
    "ErrorWord",
    "EventWriter",
    "LastWord",
    "LiveLock",
    "LiveRank",
    "LiveWindow",
    "Outcome",
    "Progress",
    "RunDir",
    "RunHistory",
    "RunSnapshot",
    "RunView",
    "Series",
    "State",
    "Stop",
    "StopRequest",
    "Verdict",
    "Warned",
    "Word",
    "decide",
    "request_stop",
    "requested_stop",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.run' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.run.{_MODULES[name]}"), name)
