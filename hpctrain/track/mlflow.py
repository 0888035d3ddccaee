"""MLflow beside the run: a process of its own follows the events, so that no server can hold up or end training."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import time
from typing import IO, Any

from hpctrain.errors import MissingExtra
from hpctrain.run import RunView
from hpctrain.run.events import Event
from hpctrain.run.folder import RunDir
from hpctrain.system import foreign_text, python, safe_read
from hpctrain.system.files import open_log
from hpctrain.system.json_shape import fits, is_count

FLUSH_S = 20.0
"""Longest wait at the end of a run for a server that answers."""
PATIENCE_S = 1.0
"""Longest wait for one that does not."""
LOOK_S = 0.05
MOST_BYTES = 1 << 16
"""Of mlflow.json."""


class MlflowSink:
    """Starts the follower with the first event and informs it when the attempt is over.

    The follower reads the run's events and keeps its position in <run folder>/mlflow.json: what a dead server missed is
    sent when it is back, by this attempt, the next one, or ``hpctrain track sync``.
    """

    def __init__(self, run_dir: RunDir, uri: str, experiment: str) -> None:
        """
        Raises:
            MissingExtra: mlflow is not installed.
        """
        if importlib.util.find_spec("mlflow") is None:
            raise MissingExtra("mlflow", "mlflow")
        self.run_dir, self.uri, self.experiment = run_dir, uri, experiment
        self.follower: subprocess.Popen[bytes] | None = None
        self.told = False

    def event(self, event: Event) -> None:
        """The events themselves reach the follower through the file."""
        if self.follower is None:
            words = [str(self.run_dir.path), self.uri, self.experiment]
            with contextlib.suppress(OSError), self._log() as log:
                self.follower = subprocess.Popen(
                    python.module("hpctrain.track.mlflow_follower", *words),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
        problem = position(self.run_dir).get("problem")
        if problem and not self.told:
            self.told = True
            foreign_text.show(f"hpctrain: MLflow at {self.uri} does not take the metrics: {problem}")

    def _log(self) -> IO[bytes]:
        return os.fdopen(open_log(self.run_dir.logs / "mlflow.out", self.run_dir.path), "ab")

    def close(self) -> None:
        """Waits while the server takes what is left, and only briefly for one that does not answer."""
        if self.follower is None or self.follower.stdin is None:
            return
        with contextlib.suppress(OSError):
            self.follower.stdin.close()  # the follower's sign that no more events come
        begin = time.monotonic()
        while self.follower.poll() is None:
            waited = time.monotonic() - begin
            answers = not position(self.run_dir).get("problem")
            if waited > (FLUSH_S if answers else PATIENCE_S):
                self.follower.kill()
                self.follower.wait()
                break
            time.sleep(LOOK_S)
        if has_unsent(self.run_dir):
            foreign_text.show(
                f"hpctrain: MLflow at {self.uri} lacks the newest events; "
                f"hpctrain track sync {self.run_dir.path} sends them when it is back",
            )


def position(run_dir: RunDir) -> dict[str, Any]:
    """What the follower has written down: run_id, offset of the first byte not sent, problem."""
    try:
        saved: dict[str, Any] = safe_read.read_json(run_dir.path / "mlflow.json", MOST_BYTES)
    except (OSError, ValueError):
        return {}
    return saved if _is_position(saved) else {}


_is_position = fits(
    {**dict.fromkeys(("uri", "run_id", "problem"), (str, None)), "has_params": bool, "offset": is_count}
)


def has_unsent(run_dir: RunDir) -> bool:
    """Whether there are events that the server has not taken."""
    offset = int(position(run_dir).get("offset", 0))
    return RunView(run_dir.path).events_from(offset, 1)[1] != offset
