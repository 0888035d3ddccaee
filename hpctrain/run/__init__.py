"""The owner of the run folder: what lies where, who may write, how attempts begin, end and are told of.

``folder`` names the files, ``attempts`` keeps run.json and the fence, ``live_lock`` lets one live run in, ranks leave
``last_words``, ``decision`` makes a ``verdict`` of them, ``stop_request`` is the STOP file. The names below are for
other rooms; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.run.attempt_record import Attempt
    from hpctrain.run.attempts import Attempts
    from hpctrain.run.decision import decide
    from hpctrain.run.folder import RunDir
    from hpctrain.run.last_words import AttemptWords, Ending, ErrorWord, LastWord
    from hpctrain.run.live_lock import LiveLock
    from hpctrain.run.stop_request import StopRequest, request_stop, requested_stop
    from hpctrain.run.verdict import Action, Stop, Verdict

_MODULES = {
    "Action": "verdict",
    "Attempt": "attempt_record",
    "AttemptWords": "last_words",
    "Attempts": "attempts",
    "Ending": "last_words",
    "ErrorWord": "last_words",
    "LastWord": "last_words",
    "LiveLock": "live_lock",
    "RunDir": "folder",
    "Stop": "verdict",
    "StopRequest": "stop_request",
    "Verdict": "verdict",
    "decide": "decision",
    "request_stop": "stop_request",
    "requested_stop": "stop_request",
}

__all__ = [
    "Action",
    "Attempt",
    "AttemptWords",
    "Attempts",
    "Ending",
    "ErrorWord",
    "LastWord",
    "LiveLock",
    "RunDir",
    "Stop",
    "StopRequest",
    "Verdict",
    "decide",
    "request_stop",
    "requested_stop",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.run.{_MODULES[name]}"), name)
