"""Inside one rank: it joins the others, builds its objects from the run file, trains, and leaves its last word.

``session`` is a rank from start to end, ``problem`` what the user's task gives, ``wiring`` the one place that knows
which class implements what, ``fit`` the training itself, ``trial`` a task tried out by the doctor, ``weighing`` one
weighed. ``plain_command`` is a rank of a program of others, ``convention`` what that is told, ``heartbeat`` what it may
call. The names below are for other rooms; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.rank.predictions import write_predictions
    from hpctrain.rank.problem import Problem, make_problem, make_weights
    from hpctrain.rank.session import Outcome, Session, run_rank
    from hpctrain.rank.wiring import make_framework

_MODULES = {
    "Outcome": "session",
    "Problem": "problem",
    "Session": "session",
    "make_framework": "wiring",
    "make_problem": "problem",
    "make_weights": "problem",
    "run_rank": "session",
    "write_predictions": "predictions",
}

__all__ = [
    "Outcome",
    "Problem",
    "Session",
    "make_framework",
    "make_problem",
    "make_weights",
    "run_rank",
    "write_predictions",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.rank' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.rank.{_MODULES[name]}"), name)
