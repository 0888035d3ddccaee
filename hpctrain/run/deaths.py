"""Who died first: a line for each death, written by the agent of the rank's node, read by the supervisor."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.system import safe_read
from hpctrain.system.files import append_bytes


def note(rank: int) -> None:
    """Appends to the deaths of this attempt; outside a supervised run nobody reads them."""
    folder, attempt = os.environ.get(RUN_DIR), os.environ.get(ATTEMPT)
    if folder and attempt:
        line = f"{time.time():.6f} {rank}\n".encode()
        with contextlib.suppress(OSError):
            append_bytes(_file(RunDir(Path(folder)), attempt), line, Path(folder))


def noted(run: RunDir, attempt: int) -> list[tuple[float, int]]:
    """Unix seconds and rank of each death of an attempt, the first one first."""
    try:
        lines = safe_read.read(_file(run, str(attempt))).decode(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that was cut off
            seconds, rank = line.split()
            found.append((float(seconds), int(rank)))
    return sorted(found)


def _file(run: RunDir, attempt: str) -> Path:
    return run.monitor / f"deaths-{attempt}.txt"
