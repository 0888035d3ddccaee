"""System calls that fail as with a faulty file server."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest


class FileServer:
    """Makes system calls fail on paths that contain a given text, a number of times or always.

    Args:
        code: errno of the failure.
        where: text that the path contains.
        call: name of the function in ``os``.
        times: number of failures.
        skips: number of calls before them.
    """

    def __init__(self, code: int, where: str, call: str, times: float = 1, skips: int = 0) -> None:
        self.code = code
        self.where = where
        self.call = call
        self.left = times
        self.skips = skips
        self.failed = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FileServer:
        """Replace the function in ``os``."""
        monkeypatch.setattr(os, self.call, self.in_front_of(getattr(os, self.call)))
        return self

    def in_front_of(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it fails where it should, and otherwise calls the real one."""

        def call(target: Any, *rest: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            if (folder := options.get("dir_fd", options.get("src_dir_fd"))) is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
            if self.left > 0 and self.where in path:
                self.skips -= 1
                if self.skips >= 0:
                    return real(target, *rest, **options)
                self.left -= 1
                self.failed += 1
                raise OSError(self.code, os.strerror(self.code), path)
            return real(target, *rest, **options)

        return call


CALLS = ("open", "stat", "lstat", "fstat", "scandir", "listdir", "mkdir", "rename", "read", "pread", "preadv", "fsync")


def one_by_one(monkeypatch: pytest.MonkeyPatch, where: str) -> Iterator[FileServer]:
    """File servers on which one call fails with ESTALE: the first call on the first, the second on the second ...

    The body runs with each; it ends after the one on which nothing failed.
    """
    for skips in count():
        with monkeypatch.context() as patched:
            server = FileServer(errno.ESTALE, where, "", skips=skips)
            for call in CALLS:
                patched.setattr(os, call, server.in_front_of(getattr(os, call)))
            yield server
        if not server.failed:
            assert skips, f"nothing was done in {where}"
            return
