"""The STOP file: anyone may create it to make a run save and stop. It may be empty or hold text that says who asks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass

from hpctrain.errors import Code
from hpctrain.run.folder import RunDir
from hpctrain.system import foreign_text, safe_read
from hpctrain.system.files import create_exclusively, write_atomically

MOST_BYTES = 1024
"""Maximum number of bytes read from a STOP file."""


@dataclass(frozen=True)
class StopRequest:
    """Who asked a run to stop."""

    by: str
    """Who asked, as text for people."""
    signal: signal.Signals | None = None
    """The signal that a process received; None if a person made the file."""

    @classmethod
    def of_signal(cls, number: int) -> StopRequest:
        """Returns the request of a process that received a signal."""
        return cls(f"signal {signal.Signals(number).name}", signal.Signals(number))

    @property
    def code(self) -> Code:
        """TIME_LIMIT for SIGUSR1, which job scripts have Slurm send before the time limit; else STOPPED."""
        return Code.TIME_LIMIT if self.signal is signal.SIGUSR1 else Code.STOPPED


BY_PERSON = StopRequest("STOP file")
"""Request of a STOP file that does not say who made it."""


def request_stop(run_dir: RunDir, request: StopRequest) -> None:
    """Asks the run to save and stop. An existing request is kept, except that a person's replaces a signal's.

    Raises:
        RunFailed: the file cannot be written.
    """
    before = requested_stop(run_dir)
    replaces = before is not None and before.signal is not None and request.signal is None
    details = json.dumps({"signal": request.signal.name}) + "\n" if request.signal else ""
    content = f"{request.by}\n{details}".encode()
    if replaces:
        write_atomically(run_dir.stop_file, content, run_dir.path)
    else:
        create_exclusively(run_dir.stop_file, content, run_dir.path)


def is_asked_to_stop(run_dir: RunDir) -> bool:
    """Whether there is a STOP file. False if the file server does not answer at the moment: ask again later."""
    return os.path.exists(run_dir.stop_file)  # Path.exists would raise


def requested_stop(run_dir: RunDir) -> StopRequest | None:
    """Returns who asked the run to stop; None without a request."""
    try:
        return _parse(safe_read.head(run_dir.stop_file, MOST_BYTES).decode(errors="replace"))
    except (PermissionError, safe_read.NotPlain):  # another user's private file, or a folder
        return BY_PERSON
    except OSError:  # there is no file, or the file server does not answer at the moment
        return None


def _parse(text: str) -> StopRequest:
    """Parses a STOP file. A process writes a line of text, then a line of JSON with its signal."""
    said, _, details = text.strip().rpartition("\n")
    with contextlib.suppress(ValueError):
        saved = safe_read.parse_json(details.encode())
        number = signal.Signals.__members__.get(str(saved.get("signal"))) if isinstance(saved, dict) else None
        if said and number is not None:
            return StopRequest(foreign_text.line(said), number)
    return StopRequest(foreign_text.line(text).strip() or BY_PERSON.by)
