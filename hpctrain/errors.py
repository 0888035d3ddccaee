"""Errors that a user can act on, and the exit codes that scripts and schedulers see."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
from collections.abc import Callable, Iterator


class ExitCode(enum.IntEnum):
    """What an hpctrain process tells its caller; values follow sysexits.h if it has a name for the case."""

    DONE = 0
    """The run reached its end."""
    USER_ERROR = 64
    """The run file, data, command line or environment is wrong: running again changes nothing."""
    FAILURE = 70
    """Something broke: a rank died, a node vanished, the program has a defect."""
    STOPPED = 75
    """Stopped on request with a checkpoint: run the same command again to resume."""
    DO_NOT_REQUEUE = 76
    """A repeated failure, or no progress: running again would waste the allocation; or a newer attempt took over."""


class Code(enum.StrEnum):
    """What went wrong, or how something ended, for programs: in run.json, last words, events and ``explain --json``.

    Sentences are for people, and may be reworded at any time.
    """

    COMPLETED = "completed"
    RUNNING = "running"
    PENDING = "pending"
    """Its job waits."""
    STOPPED = "stopped"
    """On request."""
    TIME_LIMIT = "time_limit"
    """Stopped since the job's time was nearly over."""
    CANCELLED = "cancelled"
    """Its job was taken from Slurm, which may do so itself."""
    NOT_STARTED = "not_started"
    """No job was submitted, or Slurm refused it."""

    USER_ERROR = "user_error"
    """The run file, data, command line or environment; nothing more precise is known."""
    EXCEPTION = "exception"
    """Any error that no other code is more precise about."""
    NAN = "nan"
    """Loss, gradient or weights are not finite."""
    NO_PROGRESS = "no_progress"
    """Repeated attempts made no progress."""
    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    NETWORK = "network"
    """A server or another host could not be reached, or closed the connection."""
    UNREADABLE_CHECKPOINT = "unreadable_checkpoint"
    """The file system cannot read it at the moment; whether it is damaged is not known."""
    HOROVOD = "horovod"
    """Horovod is missing, or does not match the installation."""
    IN_USE = "in_use"
    """Another run, or a newer attempt, holds the run folder."""

    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    HANG = "hang"
    VANISHED = "vanished"
    """A rank ended without a word."""
    SINGLETONS = "singletons"
    """Each rank believes that it is alone."""
    STOP = "stop"
    """Ranks did not stop in time."""

    NODE = "node"
    """A node was lost, or could not start its ranks."""
    DISK_FULL = "disk_full"
    READ_ONLY = "read_only"
    """A file system that cannot be written."""
    PREFLIGHT = "preflight"
    """Something was wrong before any rank started; nothing more precise is known."""

    STRAGGLER = "straggler"
    DATA_BOUND = "data_bound"
    EXCHANGE_BOUND = "exchange_bound"
    CHECKPOINT_FAILED = "checkpoint_failed"
    UNKNOWN = "unknown"
    """The cause is not known, or the record was written by a version of hpctrain without codes or with newer ones."""

    @classmethod
    def read(cls, value: object) -> Code:
        """The code that a record holds; UNKNOWN if it is not one of these."""
        return cls(value) if isinstance(value, str) and value in set(cls) else cls.UNKNOWN


class HpctrainError(Exception):
    """What went wrong in one sentence, how to fix it in another, and a code for programs.

    Args:
        what: what went wrong.
        fix: how to fix it.
        code: the same for programs; by default that of the class.
    """

    exit_code = ExitCode.FAILURE
    """Exit code of a process that this error ends."""
    code = Code.EXCEPTION
    """Code of an error that is raised without one. Read it with ``code_of``, which also looks at the error's cause."""

    def __init__(self, what: str, fix: str, code: Code | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.code = code or self.code

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.fix), {"code": self.code}


class UserError(HpctrainError):
    """The user's mistake: exit code 64."""

    exit_code = ExitCode.USER_ERROR
    """64."""
    code = Code.USER_ERROR
    """``user_error``; raise it with a more precise one if there is one."""


class RunFailed(HpctrainError):
    """The run broke in a way that running again may cure: exit code 70."""


class StoreDown(RunFailed):
    """A store or file server does not answer at the moment."""


class NotAllowed(RunFailed):
    """A file that this user may not write, which running again does not cure: exit code 64."""

    exit_code = ExitCode.USER_ERROR
    code = Code.USER_ERROR


class NoRequeue(HpctrainError):
    """The run broke in a way that running again will not cure: exit code 76."""

    exit_code = ExitCode.DO_NOT_REQUEUE
    """76."""


class Replaced(NoRequeue):
    """A newer attempt at the run, or another process, has taken over: this one must not write any more. Exit code 76.

    Raised only if that was seen: a file server that does not answer is not a reason.
    """

    code = Code.IN_USE

    def __init__(
        self, what: str, fix: str = "nothing to do: the newer attempt resumes from the last checkpoint"
    ) -> None:
        super().__init__(what, fix)


def kind_of(value: object) -> str:
    """The type of a value, with its article, for a sentence: ``an int``, ``the class Adam``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if re.match('nd|(?!u(int|ni|se))[aeiou]', name, re.IGNORECASE) else 'a'} {name}"


class MissingExtra(UserError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", f'pip install "hpctrain[{extra}]"')
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.package, self.extra)


@contextlib.contextmanager
def requires(package: str, extra: str) -> Iterator[None]:
    """Imports in the body raise MissingExtra if the package is not installed."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(package, extra) from error


@contextlib.contextmanager
def foreign_errors(ours: Callable[[Exception], HpctrainError]) -> Iterator[None]:
    """Errors in the body that are not ours, and calls of sys.exit, become what ``ours`` makes of them."""
    try:
        yield
    except HpctrainError:
        raise
    except SystemExit as end:
        raise ours(RuntimeError(f"sys.exit({end.code!r}) was called").with_traceback(end.__traceback__)) from end
    except Exception as error:
        raise ours(error) from error


FILE_SERVER = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR)
"""Errors of files whose server does not answer."""


def is_away(error: BaseException) -> bool:
    """Whether a file server does not answer at the moment."""
    return isinstance(error, OSError) and error.errno in FILE_SERVER


def refusal(error: Exception, what: str, fix: str) -> HpctrainError:
    """A UserError because of an error; StoreDown if a file server does not answer, which running again may cure."""
    if is_away(error):
        return StoreDown(what, "see whether the file server answers, then run the same command again")
    return UserError(what, fix)


@contextlib.contextmanager
def file_errors(what: str, fix: str) -> Iterator[None]:
    """Errors of the file system in the body become a ``refusal``: ``what``, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise refusal(error, f"{what}: {error.strerror or error}", fix) from error


GENERAL = (Code.EXCEPTION, Code.USER_ERROR)
"""General codes: the code of an error's cause is more precise."""
BY_ERRNO = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Code.DISK_FULL),
    errno.EROFS: Code.READ_ONLY,
    errno.ENOMEM: Code.OUT_OF_MEMORY,
    **dict.fromkeys((errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT), Code.NETWORK),
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH), Code.NETWORK),
}
WORDED = {
    Code.OUT_OF_MEMORY: r"MemoryError|OutOfMemoryError|ResourceExhaustedError|CUBLAS_STATUS_ALLOC_FAILED"
    r"|(CUDA|HIP|Cuda).{0,20}out of memory",
    Code.DISK_FULL: r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos",
    Code.NETWORK: r"gaierror|[Nn]ame resolution|Name or service not known|DistNetworkError"
    r"|TimeoutError\b[^:]*: .*timed out|[Cc]onnection closed by (remote )?peer",
    Code.NAN: r"(?i:(loss|gradient)s?\b.{0,40}\b(nan|inf|infinite)\b)|returned nan values|non-?finite (loss|gradient)",
}
"""Patterns of what Python, PyTorch, TensorFlow and NCCL say, in addition to the system's texts."""
QUOTING = {"ValueError", "TypeError", "LookupError", "KeyError", "IndexError"}
"""Errors about a value: their text may quote any other error's."""


def code_of(error: BaseException) -> Code:
    """The code of any error: its own, or the more precise one of the error that caused it."""
    own = error.code if isinstance(error, HpctrainError) else _foreign(error)
    if own in GENERAL and error.__cause__ is not None:
        cause = code_of(error.__cause__)
        return own if cause in GENERAL else cause
    return own


def code_of_text(text: str) -> Code:
    """The code of an error whose text is all that is known, as in a program's log: ``RuntimeError: too large``."""
    quotes = not QUOTING.isdisjoint(text.partition(":")[0].split())
    worded = [code for code, pattern in WORDED.items() if re.search(pattern, text)]
    system = [code for number, code in BY_ERRNO.items() if os.strerror(number) in text]
    return next((code for code in system + worded if code is Code.NAN or not quotes), Code.EXCEPTION)


def _foreign(error: BaseException) -> Code:
    if isinstance(error, OSError) and error.errno in BY_ERRNO:
        return BY_ERRNO[error.errno]
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    return code_of_text(f"{kinds}: {error}")
