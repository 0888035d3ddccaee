"""System calls that fail where a file server would fail them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


class FileServer:
    """Fails system calls on files and folders whose path contains a text, some times or for ever.

    Args:
        code: of errno.
        where: part of the path.
        call: name of the function of ``os``.
        times: how often it fails.
    """

    def __init__(self, code: int, where: str, call: str, times: float = 1) -> None:
        self.code = code
        self.where = where
        self.call = call
        self.left = times
        self.failed = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FileServer:
        """Puts itself in front of the system."""
        monkeypatch.setattr(os, self.call, self.in_front_of(getattr(os, self.call)))
        return self

    def in_front_of(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function that fails or does what the real one does."""

        def call(target: Any, *rest: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            if self.left > 0 and self.where in path:
                self.left -= 1
                self.failed += 1
                raise OSError(self.code, os.strerror(self.code), path)
            return real(target, *rest, **options)

        return call
