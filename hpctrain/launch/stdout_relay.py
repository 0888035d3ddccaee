"""Passes a launcher's standard output on to the user, and keeps what the launcher itself has to say."""

from __future__ import annotations

import contextlib
import os
from typing import IO

from hpctrain.launch.launcher_messages import BANNER

KEPT_BYTES = 65536


class Passing:
    """Reads without waiting; call ``pump`` often, and once more at the end.

    Args:
        source: the launcher's standard output, a pipe.
        target: descriptor of the user's standard output.
    """

    def __init__(self, source: IO[bytes], target: int) -> None:
        self.source = source.fileno()
        self.target = target
        self.tail = b""
        self.in_banner = False
        os.set_blocking(self.source, False)

    def pump(self) -> None:
        """Passes on what there is."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.source, 65536):
                self.take(chunk)

    def take(self, chunk: bytes) -> None:
        """Keeps the end of everything for the launcher's report; shows all but that report."""
        self.tail = (self.tail + chunk)[-KEPT_BYTES:]
        if self.in_banner:
            return
        banner = BANNER.search(chunk)
        self.in_banner = banner is not None
        shown = chunk[: banner.start()].removesuffix(b"\n") if banner else chunk
        with contextlib.suppress(OSError):
            while shown:
                shown = shown[os.write(self.target, shown) :]

    @property
    def text(self) -> str:
        """The end of the output."""
        return self.tail.decode(errors="replace")
