"""MLflow tracking by a process that follows the events: ``python -m hpctrain.track.mlflow``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpctrain.run.events import Event, RunFinished, RunStarted
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import Outcome
from hpctrain.system.json_shape import flat
from hpctrain.track.follower import Follower, main, shown
from hpctrain.track.sink import scalars

LONGEST_NAME = 250
"""Longest name that MLflow accepts."""
DIGEST = 36
"""Longest dataset digest that MLflow accepts."""
BATCH = 500
"""Metrics per request; MLflow accepts 1000."""
QUIET = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


class MlflowFollower(Follower):
    """Sends events to MLflow. ``client`` is an MlflowClient."""

    def __init__(self, run_dir: RunDir, client: Any, uri: str, experiment: str) -> None:
        super().__init__("mlflow", run_dir, uri)
        self.client, self.experiment = client, experiment

    def begin(self) -> None:
        """Sends parameters and data."""
        self.log_params()
        self.log_data()

    def take(self, events: Sequence[Event]) -> None:
        """Sends scalars and the run's status."""
        self.log_metrics(events)
        for event in events:
            if isinstance(event, RunStarted):
                self.client.set_tag(self.run_id, "hpctrain.attempt", str(event.attempt))
                self.client.update_run(self.run_id, status="RUNNING")
            elif isinstance(event, RunFinished):
                self.finish(event)

    def open_run(self) -> str:
        """Creates a run."""
        run = self.view.look(within_s=0.0)
        experiment = experiment_of(self.client, self.experiment, self.uri)
        tags = {"hpctrain.run_folder": str(run.path), "hpctrain.id": str(run.id)}
        if run.newest and run.newest.git_commit:
            tags["mlflow.source.git.commit"] = run.newest.git_commit
        return str(self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id)

    def log_params(self) -> None:
        """Sends the configuration as parameters."""
        from mlflow.entities import Param

        config = self.view.look(within_s=0.0).config
        values = {accepted(key): str(value)[:6000] for key, value in flat(shown(config)).items() if value is not None}
        params = [Param(key, value) for key, value in values.items()]
        for begin in range(0, len(params), 100):
            self.client.log_batch(self.run_id, params=params[begin : begin + 100])

    def log_data(self) -> None:
        """Sends the training tables as MLflow datasets, for the lineage of the run's models."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        found = self.view.look(within_s=0.0).data
        self.client.set_tag(self.run_id, "hpctrain.data", str(found.get("fingerprint")))
        tags = [InputTag("mlflow.data.context", "training")]
        inputs = [
            DatasetInput(
                Dataset(
                    name=str(source["address"])[-LONGEST_NAME:],
                    digest=str(source["files_sha256"])[:DIGEST],
                    source_type=str(source["kind"]),
                    source=json.dumps(source),
                    profile=json.dumps({"num_rows": source["rows"]}),
                ),
                tags,
            )
            for source in found.get("sources") or ()
        ]
        if inputs:
            self.client.log_inputs(self.run_id, inputs)

    def log_metrics(self, events: Iterable[Event]) -> None:
        """Sends the events' scalars with their steps and times."""
        from mlflow.entities import Metric

        metrics = [
            Metric(accepted(name), value, int(event.time * 1000), event.step)
            for event in events
            for name, value in scalars(event).items()
        ]
        for begin in range(0, len(metrics), BATCH):
            self.client.log_batch(self.run_id, metrics=metrics[begin : begin + BATCH])

    def finish(self, event: RunFinished) -> None:
        """Sends artifacts and the final status; a stopped run continues under the same id when resumed."""
        for path in self.view.records():
            self.client.log_artifact(self.run_id, str(path))
        status = "KILLED" if event.reason == Outcome.STOPPED_BY_RANKS else "FINISHED"
        self.client.set_terminated(self.run_id, status, int(event.time * 1000))


def accepted(name: str) -> str:
    """Converts a name to one that MLflow accepts; a refused name would block all later events."""
    parts = [re.sub(r"[^\w .:-]", "_", part) for part in name.split("/")]
    return "/".join(part for part in parts if part.strip("."))[:LONGEST_NAME].rstrip("/") or "_"


def experiment_of(client: Any, name: str, uri: str) -> str:
    """Returns an experiment's id, creating it if needed. For a folder, its artifacts are stored there too."""
    if found := client.get_experiment_by_name(name):
        return str(found.experiment_id)
    return str(client.create_experiment(name, None if is_address(uri) else (folder_of(uri) / "artifacts").as_uri()))


def is_address(uri: str) -> bool:
    """Whether a URI is not a folder."""
    return "://" in uri or uri == "databricks"


def folder_of(uri: str) -> Path:
    """The absolute path of a folder."""
    return Path(uri).expanduser().absolute()


def make(run_dir: RunDir, uri: str, experiment: str) -> MlflowFollower:
    """Makes a follower with MLflow's client, whose import takes seconds."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    server = uri
    if not is_address(uri):  # of a folder, the database in it: MLflow has dropped its file store
        folder_of(uri).mkdir(parents=True, exist_ok=True)
        server = f"sqlite:///{folder_of(uri) / 'mlflow.db'}"
    return MlflowFollower(run_dir, MlflowClient(server), uri, experiment)


if __name__ == "__main__":
    sys.exit(main("mlflow", make))
