"""Errors that a user can act on, and the exit codes that scripts and schedulers see."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What a hpctrain process tells its caller; values follow sysexits.h where it has a name for the case."""

    DONE = 0
    """The run reached its end."""
    USER_ERROR = 64
    """The run file, data, command line or environment is wrong: running again changes nothing."""
    FAILURE = 70
    """Something broke: a rank died, a node vanished, the program has a defect."""
    STOPPED = 75
    """Stopped on request with a checkpoint: run the same command again to go on."""
    DO_NOT_REQUEUE = 76
    """A repeated failure, or no progress: running again would waste the allocation. Or a newer attempt goes on."""


class HpctrainError(Exception):
    """What went wrong in one sentence, how to fix it in another, and the exit code it ends the run with."""

    exit_code = ExitCode.FAILURE
    """What a process that it ends exits with."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.fix)


class UserError(HpctrainError):
    """The user's mistake: exit code 64."""

    exit_code = ExitCode.USER_ERROR
    """64."""


class RunFailed(HpctrainError):
    """The run broke in a way that running again may cure: exit code 70."""


class NoRequeue(HpctrainError):
    """The run broke in a way that running again will not cure: exit code 76."""

    exit_code = ExitCode.DO_NOT_REQUEUE
    """76."""


class Replaced(NoRequeue):
    """A newer attempt at the run, or another process, has taken over: this one must not write any more. Exit code 76.

    Raised only where that was seen: a file server that does not answer is no reason.
    """

    def __init__(
        self, what: str, fix: str = "nothing to do: the newer attempt resumes from the last checkpoint"
    ) -> None:
        super().__init__(what, fix)


class MissingExtra(UserError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", f'pip install "hpctrain[{extra}]"')
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.package, self.extra)
