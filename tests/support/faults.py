"""System calls that fail as with a faulty file server."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


class FileServer:
    """Makes system calls fail on paths that contain a given text, a number of times or always.

    Args:
        code: errno of the failure.
        where: text that the path contains.
        call: name of the function in ``os``.
        times: number of failures.
    """

    def __init__(self, code: int, where: str, call: str, times: float = 1) -> None:
        self.code = code
        self.where = where
        self.call = call
        self.left = times
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
                self.left -= 1
                self.failed += 1
                raise OSError(self.code, os.strerror(self.code), path)
            return real(target, *rest, **options)

        return call
