"""The process that reads a run's events and gives them to MLflow. Started by ``MlflowSink`` and ``track sync``."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.run import Outcome, RunView
from hpctrain.run.events import Event, RunFinished, RunStarted
from hpctrain.run.folder import RunDir
from hpctrain.system import foreign_text
from hpctrain.system.files import write_atomically
from hpctrain.track.mlflow import position
from hpctrain.track.scalars import scalars

LONGEST_NAME = 250
"""Characters that MLflow takes."""
BATCH = 500
"""Metrics in one request; MLflow takes 1000."""
READ_BYTES = 1 << 18
"""Bytes of events read at a time: the position is saved after each."""
LOOK_S = 0.5
"""Seconds between two looks for new events."""
RETRY_S = 2.0
"""Seconds until a server that failed is asked again."""
QUIET = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


class Follower:
    """Sends what has not been sent. ``client`` is MLflow's own MlflowClient."""

    def __init__(self, run_dir: RunDir, client: Any, uri: str, experiment: str) -> None:
        self.run_dir, self.client, self.uri, self.experiment = run_dir, client, uri, experiment
        self.view = RunView(run_dir.path)
        saved = position(run_dir)
        known = saved if saved.get("uri") == uri else {}
        self.run_id: str | None = known.get("run_id")
        self.has_params = bool(known.get("has_params", self.run_id is not None))
        self.offset = int(known.get("offset", 0))
        self.problem: str | None = None

    def send(self) -> bool:
        """One portion; whether there was any. Raises what MLflow raises."""
        events, offset = self.view.events_from(self.offset, READ_BYTES)
        if offset == self.offset:
            return False
        if self.run_id is None:
            self.run_id = self.open_run()
            self.save()  # at once: whatever fails now, there is to be one run
        if not self.has_params:
            self.log_params()
            self.has_params = True
        self.log_metrics(events)
        for event in events:
            if isinstance(event, RunStarted):
                self.client.set_tag(self.run_id, "hpctrain.attempt", str(event.attempt))
                self.client.update_run(self.run_id, status="RUNNING")
            elif isinstance(event, RunFinished):
                self.finish(event)
        self.offset = offset
        self.problem = None
        self.save()
        return True

    def open_run(self) -> str:
        """A new run."""
        run = self.view.look(within_s=0.0)
        found = self.client.get_experiment_by_name(self.experiment)
        place = artifact_location(self.uri)
        experiment = found.experiment_id if found else self.client.create_experiment(self.experiment, place)
        tags = {"hpctrain.run_folder": str(run.path), "hpctrain.id": str(run.id)}
        if run.newest and run.newest.git_commit:
            tags["mlflow.source.git.commit"] = run.newest.git_commit
        return str(self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id)

    def log_params(self) -> None:
        """The configuration as parameters."""
        from mlflow.entities import Param

        config = self.view.look(within_s=0.0).config
        values = {accepted(key): str(value)[:6000] for key, value in flat(config) if value is not None}
        params = [Param(key, value) for key, value in values.items()]
        for begin in range(0, len(params), 100):
            self.client.log_batch(self.run_id, params=params[begin : begin + 100])

    def log_metrics(self, events: Iterable[Event]) -> None:
        """Scalars of the events, with their own steps and times."""
        from mlflow.entities import Metric

        metrics = [
            Metric(accepted(name), value, int(event.time * 1000), event.step)
            for event in events
            for name, value in scalars(event).items()
        ]
        for begin in range(0, len(metrics), BATCH):
            self.client.log_batch(self.run_id, metrics=metrics[begin : begin + BATCH])

    def finish(self, event: RunFinished) -> None:
        """Artifacts and status; a stopped run continues under the same id when it is resumed."""
        for path in self.view.records():
            self.client.log_artifact(self.run_id, str(path))
        status = "KILLED" if event.reason == Outcome.STOPPED_BY_RANKS else "FINISHED"
        self.client.set_terminated(self.run_id, status, int(event.time * 1000))

    def note_problem(self, error: Exception) -> None:
        """Leaves it for the sink, and for who asks how the run stands."""
        self.problem = _told(error)
        self.save()

    def save(self) -> None:
        """Position and problem, for the sink, the next attempt and ``track sync``."""
        fields = {
            "uri": self.uri,
            "run_id": self.run_id,
            "has_params": self.has_params,
            "offset": self.offset,
            "problem": self.problem,
        }
        write_atomically(self.run_dir.path / "mlflow.json", json.dumps(fields).encode())


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def follow(follower: Follower, is_over: Callable[[float], bool]) -> bool:
    """Sends until the run is over and everything is sent; False if the run is over and the server does not take it.

    Args:
        follower: sends.
        is_over: waits up to a number of seconds for the end of the run, and says whether it has come.
    """
    over = False
    while True:
        try:
            if follower.send():
                continue
            if over:
                return True
        except Exception as error:  # whatever a server, a proxy or a wrong address brings about
            follower.note_problem(error)
            if over:
                return False
            over = is_over(RETRY_S)
            continue
        over = is_over(LOOK_S)


def stdin_closes(seconds: float) -> bool:
    """Waits for the sink to close our standard input, or to die."""
    ready, _, _ = select.select([sys.stdin.buffer], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys and plain values."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def accepted(name: str) -> str:
    """A name as MLflow takes it: one that it refuses would hold up all that comes after."""
    parts = [re.sub(r"[^\w .:-]", "_", part) for part in name.split("/")]
    return "/".join(part for part in parts if part.strip("."))[:LONGEST_NAME].rstrip("/") or "_"


def tracking_uri(uri: str) -> str:
    """An address as it is; for a folder, the SQLite database in it (MLflow has given up its store of plain files)."""
    return uri if is_address(uri) else f"sqlite:///{folder_of(uri) / 'mlflow.db'}"


def artifact_location(uri: str) -> str | None:
    """For a folder, where the artifacts of its experiments lie; a server knows by itself."""
    return None if is_address(uri) else (folder_of(uri) / "artifacts").as_uri()


def is_address(uri: str) -> bool:
    """Whether it is anything but a folder."""
    return "://" in uri or uri == "databricks"


def folder_of(uri: str) -> Path:
    """Absolute."""
    return Path(uri).expanduser().absolute()


def make(run_dir: RunDir, uri: str, experiment: str) -> Follower:
    """A follower with MLflow's client; importing it takes seconds."""
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    from mlflow import MlflowClient

    if not is_address(uri):
        folder_of(uri).mkdir(parents=True, exist_ok=True)
    return Follower(run_dir, MlflowClient(tracking_uri(uri)), uri, experiment)


def main() -> int:
    """``python -m hpctrain.track.mlflow_follower RUN_FOLDER URI EXPERIMENT``."""
    folder, uri, experiment = sys.argv[1:]
    begin = time.monotonic()
    try:
        follower = make(RunDir(Path(folder)), uri, experiment)
    except Exception as error:  # a store that MLflow refuses: the run's own log says so
        saved = position(RunDir(Path(folder)))
        known = saved if saved.get("uri") == uri else {"uri": uri, "run_id": None, "offset": 0}
        fields = {**known, "problem": _told(error)}
        write_atomically(Path(folder) / "mlflow.json", json.dumps(fields).encode())
        return 1
    foreign_text.show(f"mlflow is there after {time.monotonic() - begin:.1f} s")
    return 0 if follow(follower, stdin_closes) else 1


if __name__ == "__main__":
    sys.exit(main())
