"""The verdict on an attempt: what to do next, with a code for programs and sentences for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from hpctrain.errors import Code, ExitCode, Replaced
from hpctrain.system.json_shape import maker

ORDERLY_CODES = (Code.COMPLETED, Code.STOPPED, Code.TIME_LIMIT)
"""Codes of attempts that ended in order."""
FIXES: Mapping[Code, str] = {
    Code.OUT_OF_MEMORY: "use a smaller batch (train.accumulate keeps the global one) or fewer data.workers, request "
    "more memory, or split the model by a plan (hpctrain plan run.yaml shows what fits)",
    Code.NETWORK: "the same command resumes it; if it happens again, check the address, and whether nodes reach it",
}
"""Advice by code, for codes that mean the same wherever they occur."""


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
    def is_failure(self) -> bool:
        """Whether the attempt did not end as planned or on request."""
        is_stop = self.action in (Action.DONE, Action.STOP)
        return not is_stop and self.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for run.json and the last words."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Any) -> RunVerdict | None:
        """Inverse of ``to_json``; None if ``saved`` is empty or not valid."""
        try:
            return _verdict_of(saved)
        except ValueError:
            return None


_verdict_of = maker(RunVerdict, exit_code=ExitCode)


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
