"""Dumps another process's stacks, to show what a hung rank is doing, even if it is stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

LONGEST = 64 * 1024
"""Largest number of characters kept of a dump."""
TIMEOUT_S = 8.0


def dump(pid: int, signal_number: int, file: Path) -> str:
    """Returns the stacks of all threads of a process, or a sentence that says why they cannot be read.

    Tries py-spy, which also reads stopped processes, then faulthandler, which needs the process to run.

    Args:
        pid: the process.
        signal_number: signal for which the process registered faulthandler; 0 if none.
        file: file to which its faulthandler writes.
    """
    text, why = with_py_spy(pid)
    if text is None:
        text, also = with_faulthandler(pid, signal_number, file)
        why = f"{why}; {also}"
    return text[:LONGEST] if text else f"no stack: {why}\n"


def with_py_spy(pid: int) -> tuple[str | None, str]:
    """Returns the dump, or None and the reason."""
    own = Path(sys.executable).with_name("py-spy")
    program = str(own) if own.exists() else shutil.which("py-spy")
    if program is None:
        return None, 'py-spy is not installed (pip install "hpctrain[monitor]")'
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"py-spy failed: {error}"
    if done.returncode == 0 and done.stdout:
        return done.stdout, ""
    last = (done.stderr.strip().splitlines() or ["no output"])[0]
    return None, f"py-spy may not read the process: {last}"


def with_faulthandler(pid: int, signal_number: int, file: Path) -> tuple[str | None, str]:
    """Signals the process to dump its own stacks and waits for its file to grow. Returns as ``with_py_spy``."""
    if not signal_number:
        return None, "the process has no faulthandler"
    before = file.stat().st_size if file.exists() else 0
    try:
        os.kill(pid, signal_number)
    except OSError as error:
        return None, f"the process cannot be signalled: {error.strerror}"
    size = before
    for _ in range(20):
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            if file.stat().st_size == size > before:
                break
            size = file.stat().st_size
    if size <= before:
        return None, "the process does not run, so its faulthandler cannot answer"
    with open(file, encoding="utf-8", errors="replace") as stream:
        stream.seek(before)
        return stream.read(), ""
