"""The verdict on an attempt: what to do next, with a code for programs and sentences for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpctrain.errors import Code, ExitCode, Replaced
from hpctrain.system.json_shape import fits, is_count

ORDERLY_CODES = (Code.COMPLETED, Code.STOPPED, Code.TIME_LIMIT)
"""Codes of attempts that ended in order."""
BY_SUPERVISOR = (*(Code.KILLED, Code.OUT_OF_MEMORY, Code.NODE, Code.HANG), *(Code.VANISHED, Code.STOP, Code.PREFLIGHT))
"""Codes of failures that the supervisor finds; the field ``cause`` uses the same names."""
BY_CAUSE = {"replaced": Code.IN_USE, **{code.value: code for code in BY_SUPERVISOR}}
"""Code by ``cause``, for stored verdicts that have no code."""
FIXES: Mapping[Code, str] = {
    Code.OUT_OF_MEMORY: "use a smaller batch (train.accumulate keeps the global one) or fewer data.workers, request "
    "more memory, or split the model by a plan (hpctrain plan run.yaml shows what fits)",
    Code.NETWORK: "the same command resumes it; if it happens again, check the address, and whether nodes reach it",
}
"""Advice by code, for codes that mean the same wherever they occur."""

_is_verdict = fits(
    {
        **dict.fromkeys(("action", "reason", "fix", "host", "code", "cause"), (str, None)),
        **{"exit_code": (int, None), "rank": (is_count, None)},
    }
)


class Action(StrEnum):
    """What a supervisor does next."""

    DONE = "done"
    """The run has reached its end."""
    STOP = "stop"
    """A person asked the run to stop; it stays stopped until the same command resumes it."""
    REQUEUE = "requeue"
    """Start another attempt, which resumes from the last checkpoint."""
    FAIL = "fail"
    """Another attempt would fail in the same way; something must be corrected first."""
    DO_NOT_REQUEUE = "do_not_requeue"
    """Attempts fail repeatedly or make no progress."""


@dataclass(frozen=True)
class RunVerdict:
    """The decision, its exit code, and a sentence each on why and what to do."""

    action: Action
    exit_code: ExitCode
    reason: str
    fix: str = ""
    rank: int | None = None
    """The rank that failed first."""
    host: str | None = None
    """Host of that rank, or the lost host."""
    code: Code = Code.UNKNOWN
    """The reason as a code, for programs."""
    before_ranks: bool = False
    """Whether the attempt ended before any rank was started."""

    @property
    def cause(self) -> str | None:
        """Value of the field ``cause`` in run.json, which predates codes; None if nothing failed."""
        if self.before_ranks:
            return "preflight"
        if self.code is Code.IN_USE:
            return "replaced"
        if self.code in BY_SUPERVISOR:
            return self.code.value
        return None if self.code in (*ORDERLY_CODES, Code.UNKNOWN) else "error"

    @property
    def is_failure(self) -> bool:
        """Whether the attempt did not end as planned or on request."""
        is_stop = self.action in (Action.DONE, Action.STOP)
        return not is_stop and self.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for run.json and the last words."""
        return {
            "action": self.action.value,
            "exit_code": int(self.exit_code),
            "reason": self.reason,
            "fix": self.fix,
            "rank": self.rank,
            "host": self.host,
            "code": self.code.value,
            "cause": self.cause,
        }

    @classmethod
    def from_json(cls, saved: Any) -> RunVerdict | None:
        """Inverse of ``to_json``; None if ``saved`` is empty or not valid."""
        if not _is_verdict(saved):
            return None
        action, exit_code, cause = saved.get("action"), saved.get("exit_code"), saved.get("cause")
        if action not in set(Action):
            return None
        return cls(
            Action(action),
            ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.FAILURE,
            saved.get("reason") or "",
            saved.get("fix") or "",
            saved.get("rank"),
            saved.get("host"),
            Code.read(saved["code"]) if "code" in saved else BY_CAUSE.get(cause or "", Code.UNKNOWN),
            before_ranks=cause == "preflight",
        )


def failed_with(code: Code, reason: str, fix: str, rank: int | None = None, host: str | None = None) -> RunVerdict:
    """Returns the verdict on an attempt whose failure may not occur again."""
    return RunVerdict(Action.REQUEUE, ExitCode.FAILURE, reason, fix, rank, host, code)


def replaced(error: Replaced) -> RunVerdict:
    """Returns the verdict on an attempt that may no longer write, however its ranks ended."""
    return RunVerdict(Action.DO_NOT_REQUEUE, error.exit_code, error.what, error.fix, code=error.code)


@dataclass(frozen=True)
class Stop:
    """A stop request that this attempt received."""

    by: str
    """Who asked."""
    by_person: bool
    """Whether a person wants the run to stay stopped; False if a scheduler needs the nodes."""
    code: Code = Code.STOPPED
