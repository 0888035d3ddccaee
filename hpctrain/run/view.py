"""The one way to know how a run stands: reads the files of its folder, as a whole or what is new. Never writes."""

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
from hpctrain.run.attempt_record import Attempt, info_of
from hpctrain.run.event_log import EventFollower, read_events, stored_events
from hpctrain.run.events import Decoder, Event, decode, takeovers
from hpctrain.run.folder import RunDir
from hpctrain.run.growing_file import JsonFile, Tail
from hpctrain.run.progress import Progress
from hpctrain.run.run_status import Life, LiveWindow, RunSnapshot
from hpctrain.run.stop_request import requested_stop
from hpctrain.system import bounded_yaml, safe_read
from hpctrain.system.json_shape import fits, maker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpctrain.run.figures import Figures, Picture, Plans
    from hpctrain.run.history import RunHistory


class RunView:
    """A run folder, which need not be there yet, for looking at again and again: what was read once is kept.

    Args:
        path: the run folder.
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
        """Newest sign of life by the file system's clock, and when it was seen by our monotonic one."""

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._run.path

    def look(self, within_s: float = float("inf")) -> RunSnapshot:
        """The run as it is now, from a handful of files of which only what is new is read; no folder is listed.

        Args:
            within_s: longest time to read events; what is left then is for the next look.

        Raises:
            UserError: the folder may not be read.
        """
        # A run takes the lock, begins an attempt, writes events, ends the attempt, gives the lock back. In this order
        # of looks, no end is seen without the events before it, and no attempt without its holder.
        life = self._life()
        info = self._info.read() or {}
        life = life or self._life()
        until = time.monotonic() + within_s
        self._events.look()
        while self._events.is_behind and time.monotonic() < until:
            self._events.look()
        progress = copy.deepcopy(self._events.progress)
        return self._snapshot(info, progress, self._events.decoder, life, is_behind=self._events.is_behind)

    def snapshot(self) -> RunSnapshot:
        """All that is known of the run now, except for curves.

        Raises:
            UserError: the folder may not be read.
        """
        return self._complete(self.look())

    def history(self) -> RunHistory:
        """All that is known of the run now, with its curves; reads all events.

        Raises:
            UserError: the folder may not be read.
        """
        from hpctrain.run.history import MARKS, Columns

        life, info = self._life(), self._info.read() or {}
        files = (self._run.events, self._run.monitor_events)
        columns = Columns(takeovers(event for path in files for event in stored_events(path, marked=MARKS)))
        progress, decoder = Progress(), Decoder()
        for path in files:
            for event in stored_events(path, decoder):
                columns.add(event)
                progress.add(event)
        return columns.history(self._complete(self._snapshot(info, progress, decoder, life)))

    def events(self) -> list[Event]:
        """All events by time, without steps that a later attempt computed again."""
        return read_events(self._run)

    def events_from(self, offset: int, most_bytes: int) -> tuple[list[Event], int]:
        """Events that rank 0 wrote, in its order, and where to continue; for readers that keep their place themselves.

        Args:
            offset: what the last call returned, 0 at first.
            most_bytes: about how much to read.

        Returns:
            Events, and the offset behind them: the same as before if there is nothing new. Of another file in the
            same place, the events from its beginning.
        """
        tail = Tail(self._run.events, offset)
        content = tail.lines(most_bytes)
        return decode(content), (0 if tail.restarts else offset) + len(content)

    def records(self) -> list[Path]:
        """The files that say what the run is: its run file and its attempts."""
        return [path for path in (self._run.run_yaml, self._run.run_json) if path.is_file()]

    def pictures(self) -> list[Picture]:
        """Pictures that the task's hooks have left, by name."""
        from hpctrain.run.figures import read_pictures

        return read_pictures(self.path / "pictures")

    def figures(self) -> Figures | None:
        """Curves and matrices of the newest evaluation; None if the task has no metric that gives one."""
        from hpctrain.run.figures import read_figures

        return read_figures(self._run.figures)

    def plans(self) -> Plans | None:
        """Plans that ``hpctrain plan`` has kept; None without any."""
        from hpctrain.run.figures import read_plans

        return read_plans(self._run.plans)

    def heat_map(self) -> NDArray[Any] | None:
        """float64[ranks, windows]: the monitor's map of busy time beyond the peers' (0.2 for 20%); None without one."""
        from hpctrain.run.figures import read_heat_map

        return read_heat_map(self._run.heat_map)

    def _snapshot(
        self, info: Mapping[str, Any], progress: Progress, decoder: Decoder, life: Life | None, is_behind: bool = False
    ) -> RunSnapshot:
        attempts = tuple(Attempt.from_json(entry) for entry in info.get("attempts") or ())
        if not self._config or len(attempts) != self._num_attempts:  # an attempt may come with other options
            self._config, self._num_attempts = run_config(self._run.run_yaml) or self._config, len(attempts)
        return RunSnapshot(
            path=self.path,
            id=info.get("id"),
            config=self._config,
            attempts=attempts,
            progress=progress,
            data=data if isinstance(data := info.get("data"), dict) else {},
            life=life,
            live=self._live.read(),
            left_out=decoder.note,
            is_behind=is_behind,
        )

    def _complete(self, found: RunSnapshot) -> RunSnapshot:
        """With what only a listing of folders shows."""
        numbers = {attempt.number for attempt in found.attempts} | set(range(1, found.progress.attempt + 1))
        asked = requested_stop(self._run)
        return dataclasses.replace(
            found,
            stop_requested_by=asked.by if asked else None,
            checkpoint_step=self._run.newest_checkpoint_step(),
            words={number: each for number in sorted(numbers) if (each := last_words.read(self._run, number))},
        )

    def _life(self) -> Life | None:
        """Who uses the run folder, and whether they still do."""
        holder: live_lock.Holder | None = self._lock.read()
        if self._lock.changed is None or holder is None:  # being written just now
            return None
        now = time.monotonic()
        if self._beat[0] != self._lock.changed:
            # The clocks of this host and of the file system may differ; from the next sign of life on, ours counts.
            first = max(0.0, time.time() - self._lock.changed) if self._beat[0] is None else 0.0
            self._beat = self._lock.changed, now - first
        lives = live_lock.is_live(holder, now - self._beat[1], self._me)
        sure = holder.machine == self._me.machine
        return Life(lives, sure, f"process {holder.pid} on {holder.host}")


def run_config(path: Path) -> dict[str, Any]:
    """run.yaml as it stands; empty if it is missing or damaged."""
    try:
        loaded: dict[str, Any] = read_yaml(safe_read.read(path, bounded_yaml.MOST_BYTES).decode())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if _is_config(loaded) else {}


_is_config = fits({"name": (str, None), **dict.fromkeys(("launch", "train", "track", "task_args"), (dict, None))})
