"""The one loop that tries again what another machine serves: a store, a file server, a scheduler's controller."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from hpctrain.errors import FILE_SERVER, RunFailed, StoreDown

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

FILE_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Seconds between attempts to use a file whose server does not answer."""
AWAY = (*FILE_SERVER, errno.EAGAIN)
"""Errors seen while a file server fails over."""


def retry(call: Callable[[], T], again: type[E], pauses_s: Iterable[float], pause: Callable[[float, E], object]) -> T:
    """Calls ``call`` until it does not raise ``again``; returns its result, or raises the last error.

    Args:
        call: what to try.
        again: the errors that pass.
        pauses_s: seconds before each further try.
        pause: pause(seconds, error) waits, and may raise another error.
    """
    for pause_s in pauses_s:
        try:
            return call()
        except again as error:
            pause(pause_s, error)
    return call()


class StaysDown(StoreDown):
    """A file server was waited for in vain; no one waits again."""


def retry_files(use: Callable[[], T]) -> T:
    """Calls ``use`` until it succeeds, as long as a file server is down, pausing FILE_PAUSES_S; returns its result.

    Not for what is polled: it may take seconds.

    Raises:
        StaysDown: it does not come back.
        Exception: any other error of ``use``.
    """

    def pause(pause_s: float, error: Exception) -> None:
        if not _passes(error):
            raise error
        time.sleep(pause_s)

    try:
        return retry(use, Exception, FILE_PAUSES_S, pause)
    except (OSError, RunFailed) as error:
        if not _passes(error):
            raise
        raise StaysDown(*_told(error)) from error


def retry_or_fail(use: Callable[[], T]) -> T:
    """Calls ``use`` as ``retry_files`` does. Raises RunFailed for any error of the file system."""
    try:
        return retry_files(use)
    except OSError as error:
        raise RunFailed(*_told(error)) from error


def _passes(error: Exception) -> bool:
    """Whether a file server is down, and no caller has waited for it in vain."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in AWAY and not isinstance(error, StaysDown)


def _told(error: OSError | RunFailed) -> tuple[str, str]:
    if isinstance(error, RunFailed):
        return error.what, error.fix
    what = f"{error.filename or 'the run folder'} cannot be used: {error.strerror or error}"
    return what, "see whether its file system answers, then start the run again"
