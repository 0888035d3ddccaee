"""A process that follows a run's events and sends them to a tracking server, which cannot then delay or end training.

A tracker's module defines a ``Follower`` and runs as the process: ``python -m hpctrain.track.mlflow``. ``FollowerSink``
starts it; ``hpctrain track sync`` sends in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.run.events import Event
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from hpctrain.system import foreign_text, processes, python, safe_read
from hpctrain.system.files import open_log, write_atomically
from hpctrain.system.json_shape import fits, is_count

FLUSH_S = 20.0
"""Longest wait at the end of a run for a server that answers."""
UNANSWERED_S = 1.0
"""Longest wait at the end of a run for a server that does not answer."""
LOOK_S = 0.05
MOST_BYTES = 1 << 16
"""Largest file of a follower's position."""
READ_BYTES = 1 << 18
"""Bytes of events read at a time; the position is saved after each portion."""
NEW_EVENTS_S = 0.5
"""Seconds between polls for new events."""
RETRY_S = 2.0
"""Seconds until a failed server is tried again."""


class FollowerSink:
    """Starts the follower at the first event and tells it when the attempt is over.

    The follower reads the run's events and keeps its position in <run folder>/<name>.json: events that an unavailable
    server missed are sent once it is back, by this attempt, the next one, or ``hpctrain track sync``.

    Args:
        name: name of the follower's module in this package.
        title: name of the tracker, for messages.
        run_dir: the run.
        uri: the tracker's server or project.
        more: last command-line argument of the process.
    """

    def __init__(self, name: str, title: str, run_dir: RunDir, uri: str, more: str = "") -> None:
        self.name = name
        self.title = f"{title} at {uri}"
        self.run_dir = run_dir
        self.words = (str(run_dir.path), uri, more)
        self.follower: subprocess.Popen[bytes] | None = None
        self.has_warned = False

    def event(self, event: Event) -> None:
        """Starts the follower, which reads events from the file, and reports its problem once."""
        if self.follower is None:
            place = self.run_dir.logs / f"{self.name}.out"
            with contextlib.suppress(OSError), os.fdopen(open_log(place, self.run_dir.path), "ab") as log:
                self.follower = subprocess.Popen(
                    python.module(f"hpctrain.track.{self.name}", *self.words),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
        problem = position(self.run_dir, self.name).get("problem")
        if problem and not self.has_warned:
            self.has_warned = True
            foreign_text.show(f"hpctrain: {self.title} does not accept the metrics: {problem}")

    def close(self) -> None:
        """Ends the follower, and waits for the server to receive the rest, only briefly if it does not answer."""
        if self.follower is None:
            return
        ended = time.monotonic()
        if self.follower.stdin is not None:
            with contextlib.suppress(OSError):
                self.follower.stdin.close()
        while self.follower.poll() is None:
            waited = time.monotonic() - ended
            answers = not position(self.run_dir, self.name).get("problem")
            if waited > (FLUSH_S if answers else UNANSWERED_S):
                processes.kill(self.follower)
                break
            time.sleep(LOOK_S)
        if self.follower.returncode != 0 or has_unsent(self.run_dir, self.name):
            foreign_text.show(
                f"hpctrain: {self.title} lacks the newest events; "
                f"hpctrain track sync {self.run_dir.path} sends them when it is back"
            )


def position(run_dir: RunDir, name: str) -> dict[str, Any]:
    """Reads a follower's saved position: run_id, offset of the first unsent byte, problem, ..."""
    try:
        saved: dict[str, Any] = safe_read.read_json(run_dir.path / f"{name}.json", MOST_BYTES)
    except (OSError, ValueError):
        return {}
    return saved if _is_position(saved) else {}


_is_position = fits(
    {**dict.fromkeys(("id", "uri", "run_id", "problem"), (str, None)), "has_params": bool, "offset": is_count}
)


def has_unsent(run_dir: RunDir, name: str) -> bool:
    """Whether there are events that the server has not received."""
    offset = int(position(run_dir, name).get("offset", 0))
    return RunView(run_dir.path).events_from(offset, 1)[1] != offset


class FollowerState:
    """What a tracker has received of a run, in a file that the sink and the next attempt read."""

    def __init__(self, name: str, run_dir: RunDir, uri: str) -> None:
        self.name, self.run_dir, self.uri = name, run_dir, uri
        self.view = RunView(run_dir.path)
        saved = position(run_dir, name)
        self.id = self.view.look(within_s=0.0).id
        known = saved if (saved.get("uri"), saved.get("id", self.id)) == (uri, self.id) else {}
        self.run_id: str | None = known.get("run_id")
        self.has_params = bool(known.get("has_params", self.run_id is not None))
        self.offset = int(known.get("offset", 0))
        self.problem: str | None = None

    def confirmed(self) -> int:
        """Offset of the first byte that the server may lack."""
        return self.offset

    def note_problem(self, error: Exception) -> None:
        """Saves the error, which the sink and ``hpctrain track sync`` show."""
        self.problem = " ".join(str(error).split())[:300] or type(error).__name__
        self.save()

    def save(self) -> None:
        """Saves position and problem for the sink and the next attempt."""
        fields = {
            "id": self.id,
            "uri": self.uri,
            "run_id": self.run_id,
            "has_params": self.has_params,
            "offset": self.confirmed(),
            "problem": self.problem,
        }
        write_atomically(self.run_dir.path / f"{self.name}.json", json.dumps(fields).encode())


class Follower(FollowerState, ABC):
    """Sends unsent events to a tracker; subclasses define how."""

    @abstractmethod
    def open_run(self) -> str:
        """Creates a run in the tracker; returns its id."""

    @abstractmethod
    def begin(self) -> None:
        """Sends the run's configuration, once."""

    @abstractmethod
    def take(self, events: Sequence[Event]) -> None:
        """Sends events."""

    def close(self) -> None:
        """Called when everything has been sent."""

    def send(self) -> bool:
        """Sends one portion; returns whether there was any. Raises errors of the tracker's library."""
        events, offset = self.view.events_from(self.offset, READ_BYTES)
        if offset == self.offset:
            return False
        if self.run_id is None:
            self.run_id = self.open_run()
            self.save()  # at once, so that a failure does not lead to a second run
        if not self.has_params:
            self.begin()
            self.has_params = True
        self.take(events)
        self.offset = offset
        self.problem = None
        self.save()
        return True


def follow(follower: Follower, is_over: Callable[[float], bool]) -> bool:
    """Sends until the run is over and everything is sent; False if the server fails after the end of the run.

    Args:
        follower: the follower.
        is_over: waits up to a number of seconds for the end of the run; returns whether it has ended.
    """
    over = False
    while True:
        try:
            if follower.send():
                continue
            if over:
                follower.close()
                return True
        except Exception as error:  # any error of a server, a proxy or a wrong address
            follower.note_problem(error)
            if over:
                return False
            over = is_over(RETRY_S)
            continue
        over = is_over(NEW_EVENTS_S)


def stdin_closes(seconds: float) -> bool:
    """Waits for the sink to close our stdin, or to die."""
    ready, _, _ = select.select([sys.stdin.buffer], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as sent to a server: without ``launch.env``, which may hold secrets."""
    launch = {key: value for key, value in config.get("launch", {}).items() if key != "env"}
    return {**config, "launch": launch}


def main(name: str, make: Callable[[RunDir, str, str], Follower]) -> int:
    """Runs the process with arguments RUN_FOLDER URI MORE. ``make`` imports the tracker's library."""
    folder, uri, more = sys.argv[1:]
    begin = time.monotonic()
    try:
        follower = make(RunDir(Path(folder)), uri, more)
    except Exception as error:  # the library refuses the store: the sink reports it
        FollowerState(name, RunDir(Path(folder)), uri).note_problem(error)
        return 1
    foreign_text.show(f"connected to {name} after {time.monotonic() - begin:.1f} s")
    return 0 if follow(follower, stdin_closes) else 1
