"""Stores that do not answer: which errors pass, and how long readers wait until they do."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from hpctrain.errors import HpctrainError, StoreDown, UserError, is_away
from hpctrain.system.retry import retry

T = TypeVar("T")

PAUSES_S: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)
"""Waits before further tries, each after the store's library has given up retrying: 91 seconds in all."""
PASSES = re.compile(
    r"\b(408|429|50[0-4])\b|time(d|s)?[ -]?out|connect|unavailable|slow ?down|throttl|reset|closed|broken pipe|resolv"
    r"|incomplete|unexpected end|\bEOF\b|truncat|temporar|busy|sending request|bytes,? (but|in place of)",
    re.I,
)
"""What libraries say of faults that pass. They share no class of errors."""
EXPIRED = re.compile(r"expired", re.I)
DENIED = re.compile(r"denied|forbidden|unauthori[sz]ed|\b40[13]\b|credential|signature|access key", re.I)


@contextlib.contextmanager
def noticing(where: str, remote: bool) -> Iterator[None]:
    """Raise StoreDown for errors in the body that pass, UserError if credentials have expired; others propagate."""
    try:
        yield
    except (HpctrainError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        text = str(error).partition("\n\nDebug source")[0].replace("\n", " ")[:600]
        if remote and EXPIRED.search(text):
            what = f"the credentials for {where} have expired: {text}"
            raise UserError(what, "renew them (such as: aws sso login), then start the run again") from error
        of_store = remote and not DENIED.search(text) and (isinstance(error, OSError) or PASSES.search(text))
        if not is_away(error) and not of_store:
            raise
        fix = "see whether the store can be reached from the nodes, then start the run again: it resumes"
        raise StoreDown(f"{where} does not answer: {text}", fix) from error


def retry_store(call: Callable[[], T]) -> T:
    """Calls ``call`` until the store answers; raises StoreDown after PAUSES_S."""
    return retry(call, StoreDown, PAUSES_S, lambda pause_s, error: time.sleep(pause_s))


def retry_local(where: str, call: Callable[[], T]) -> T:
    """Calls ``call``, which uses local files, until their server answers; raises StoreDown after PAUSES_S."""

    def once() -> T:
        with noticing(where, remote=False):
            return call()

    return retry_store(once)


def retry_items(begin: Callable[[], Iterable[T]]) -> Iterator[T]:
    """Yields what ``begin`` gives; while the store is away, begins again behind the last item. See ``retry_store``."""
    given = 0
    items: Iterator[T] | None = None

    def following() -> list[T]:
        nonlocal items
        items = items or islice(begin(), given, None)
        try:
            return list(islice(items, 1))
        except StoreDown:
            items = None
            raise

    while item := retry_store(following):
        yield from item
        given += 1
