"""The one way to read the state of a run: from the files in its folder, whole or only what is new. Never writes."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hpctrain.config.values import read_yaml
from hpctrain.run import last_words, live_lock
from hpctrain.run.attempts import info_of, since_fresh
from hpctrain.run.event_log import EventFollower, read_events, stored_events
from hpctrain.run.events import Decoder, Event, decode, takeovers
from hpctrain.run.folder import RunDir
from hpctrain.run.progress import Progress
from hpctrain.run.run_status import Life, LiveWindow, RunSnapshot
from hpctrain.run.stop_request import requested_stop
from hpctrain.run.tail import JsonFile, Tail
from hpctrain.system import bounded_yaml, safe_read
from hpctrain.system.json_shape import fits, maker

if TYPE_CHECKING:
    from hpctrain.run.figures import Figures, Picture
    from hpctrain.run.history import RunHistory
    from hpctrain.system.array_types import Array


class RunView:
    """Reads a run folder, once or repeatedly; each look reads only what is new.

    Args:
        path: the run folder, which need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._run = RunDir(Path(path).absolute())
        self._events = EventFollower(self._run)
        self._info = JsonFile(self._run.run_json, info_of)
        self._live = JsonFile(self._run.live_view, maker(LiveWindow))
        self._lock = JsonFile(self._run.lock_file, live_lock.lock_of)
        self._me = live_lock.myself()
        self._config: Mapping[str, Any] = {}
        self._num_attempts = 0
        self._beat: tuple[float | None, float] = None, 0.0
        """Time of the newest sign of life by the file system's clock, and by this process's monotonic clock."""

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._run.path

    def look(self, within_s: float = float("inf")) -> RunSnapshot:
        """Returns the run as it is now. Cheap: reads only what is new in a few files, and lists no folder.

        Args:
            within_s: time limit for reading events; the next look reads the rest.

        Raises:
            UserError: no permission to read the folder.
        """
        # A run takes the lock, begins an attempt, writes events, ends the attempt and releases the lock. Reading in the
        # order below never shows an end without the events before it, nor an attempt without its holder.
        life = self._life()
        info = self._info.read() or {}
        life = life or self._life()
        until = time.monotonic() + within_s
        self._events.progress.count_from(first_of(info))
        self._events.look()
        while self._events.is_behind and time.monotonic() < until:
            self._events.look()
        progress = copy.deepcopy(self._events.progress)
        return self._snapshot(info, progress, self._events.decoder, life, is_behind=self._events.is_behind)

    def snapshot(self) -> RunSnapshot:
        """Returns everything known about the run now, except for curves.

        Raises:
            UserError: no permission to read the folder.
        """
        return self._complete(self.look())

    def history(self) -> RunHistory:
        """Returns everything known about the run now, with its curves; reads all events.

        Raises:
            UserError: no permission to read the folder.
        """
        from hpctrain.run.history import MARKS, EventColumns

        life, info = self._life(), self._info.read() or {}
        files = (self._run.events, self._run.monitor_events)
        columns = EventColumns(takeovers(event for path in files for event in stored_events(path, marked=MARKS)))
        progress, decoder = Progress(), Decoder()
        progress.count_from(first_of(info))
        for path in files:
            for event in stored_events(path, decoder):
                columns.add(event)
                progress.add(event)
        return columns.history(self._complete(self._snapshot(info, progress, decoder, life)))

    def events(self) -> list[Event]:
        """Returns all events by time, without steps that a later attempt computed again."""
        return read_events(self._run)

    def events_from(self, offset: int, most_bytes: int) -> tuple[list[Event], int]:
        """Returns new events of rank 0's file in order, for readers that keep the offset themselves.

        Args:
            offset: the offset returned by the last call; 0 at first.
            most_bytes: about how much to read.

        Returns:
            The events, and the offset after them, unchanged if there is nothing new. If the file has become shorter,
            reading starts again from its beginning.
        """
        tail = Tail(self._run.events, offset)
        content = tail.lines(most_bytes)
        return decode(content), (0 if tail.restarts else offset) + len(content)

    def records(self) -> list[Path]:
        """Returns the existing files that describe the run: run.yaml and run.json."""
        return [path for path in (self._run.run_yaml, self._run.run_json) if path.is_file()]

    def pictures(self) -> list[Picture]:
        """Returns the pictures that the task's hooks have left, sorted by name."""
        from hpctrain.run.figures import read_pictures

        return read_pictures(self.path / "pictures")

    def figures(self) -> Figures | None:
        """Returns the curves and matrices of the newest evaluation; None if no metric returns one."""
        from hpctrain.run.figures import read_figures

        return read_figures(self._run.figures)

    def heat_map(self) -> Array | None:
        """Returns the monitor's map of busy time above the peers' (0.2 for 20%), float64[ranks, windows], or None."""
        from hpctrain.run.figures import read_heat_map

        return read_heat_map(self._run.heat_map)

    def _snapshot(
        self, info: Mapping[str, Any], progress: Progress, decoder: Decoder, life: Life | None, is_behind: bool = False
    ) -> RunSnapshot:
        attempts = tuple(since_fresh(info))
        if not self._config or len(attempts) != self._num_attempts:  # a new attempt may have other options
            self._config, self._num_attempts = run_config(self._run.run_yaml) or self._config, len(attempts)
        data, reducer = info.get("data"), info.get("reducer")
        return RunSnapshot(
            path=self.path,
            id=info.get("id"),
            config=self._config,
            attempts=attempts,
            progress=progress,
            data=data if isinstance(data, dict) else {},
            reducer=reducer if isinstance(reducer, dict) else {},
            life=life,
            live=self._live.read(),
            left_out=decoder.note,
            is_behind=is_behind,
        )

    def _complete(self, found: RunSnapshot) -> RunSnapshot:
        """Adds what can be found only by listing folders or reading more files."""
        numbers = {attempt.number for attempt in found.attempts} | set(range(1, found.progress.attempt + 1))
        words = {number: last_words.read(self._run, number) for number in sorted(numbers)}
        asked = requested_stop(self._run)
        return dataclasses.replace(
            found,
            stop_requested_by=asked.by if asked else None,
            checkpoint_step=self._run.newest_checkpoint_step(),
            words={number: each for number, each in words.items() if each},
        )

    def _life(self) -> Life | None:
        """Returns the process that holds the run folder's lock, and whether it is alive; None if there is none."""
        holder: live_lock.Holder | None = self._lock.read()
        if self._lock.changed is None or holder is None:  # no lock file, or it is being written
            return None
        now = time.monotonic()
        if self._beat[0] != self._lock.changed:
            # This host's and the file system's clocks may differ; later signs of life are timed by this host's only.
            first = max(0.0, time.time() - self._lock.changed) if self._beat[0] is None else 0.0
            self._beat = self._lock.changed, now - first
        lives = live_lock.is_live(holder, now - self._beat[1], self._me)
        sure = holder.machine == self._me.machine
        return Life(lives, sure, f"process {holder.pid} on {holder.host}")


def run_config(path: Path) -> dict[str, Any]:
    """Reads run.yaml without validating it; empty if it is missing or damaged."""
    try:
        loaded: dict[str, Any] = read_yaml(safe_read.read(path, bounded_yaml.MOST_BYTES).decode())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if _is_config(loaded) else {}


_is_config = fits({"name": (str, None), **dict.fromkeys(("launch", "train", "track", "task_args"), (dict, None))})


def first_of(info: Mapping[str, Any]) -> int:
    """Returns the number of the run's first attempt; 0 without one."""
    return next((each.number for each in since_fresh(info)), 0)
