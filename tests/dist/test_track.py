"""Trackers, read back with their own readers: TensorBoard, Prometheus, W&B, a real MLflow server that dies mid-run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.programs.plain_command import reserve_port
from tests.support import mpi
from tests.support.command import PROJECT, events, hpctrain, wait_for, write_run
from tests.support.mpi import PATIENCE_S
from tests.tasks import torch_slow_task

SLOW = f"{PROJECT}/tests/tasks/torch_slow_task.py:task"
READ_BACK = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
(run,) = [run for e in client.search_experiments() for run in client.search_runs([e.experiment_id])]
read = lambda name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]
history = {name: read(name) for name in run.data.metrics}
inputs = [[each.dataset.name, each.dataset.digest] for each in run.inputs.dataset_inputs]
artifacts = [artifact.path for artifact in client.list_artifacts(run.info.run_id)]
found = {"params": run.data.params, "status": run.info.status, "metrics": history, "artifacts": artifacts}
print(json.dumps({**found, "inputs": inputs}))
"""


READ_BOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator(sys.argv[1])
board.Reload()
print(json.dumps({tag: [[s.step, s.value] for s in board.Scalars(tag)] for tag in board.Tags()["scalars"]}))
"""


READ_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore
found = {"history": [], "config": {}}
(path,) = Path(sys.argv[1]).glob("offline-run-*/*.wandb")
store = DataStore()
store.open_for_scan(str(path))
while data := store.scan_data():
    record = Record()
    record.ParseFromString(data)
    items = {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
    if "train/loss" in items:
        found["history"].append([items["_step"], items["train/loss"]])
    if record.WhichOneof("record_type") == "run":
        found |= {"id": record.run.run_id, "project": record.run.project}
        found["config"] |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
print(json.dumps(found))
"""


def run_python(program: str, argument: str) -> dict[str, Any]:
    """Run a tracker's reader in a separate process, because it leaves threads and settings behind."""
    done = subprocess.run([sys.executable, "-c", program, argument], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(folder: Path) -> Path:
    """Write the task's rows to a table."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table(
            {name: rows.tolist() for name, rows in torch_slow_task.rows().items()},
            pyarrow.schema({name: pyarrow.list_(pyarrow.float32()) for name in "xy"}),
        ),
        folder / "rows.parquet",
    )
    return folder / "rows.parquet"


def losses(run: Path) -> list[list[float]]:
    return [[event["step"], event["loss"]] for event in events(run, "train")]


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real server with a database in a folder; it is ended with everything it started."""
    environment = os.environ | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"
    }  # avoids eight processes that are not needed here
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    places = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "files")]
    with open(folder / "server.log", "ab") as log:
        server = subprocess.Popen([*command, *places], env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for("MLflow server", lambda: healthy(port))
        yield server
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def healthy(port: int, page: str = "health") -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def port() -> Iterator[int]:
    """A reserved port."""
    with reserve_port() as holder:
        yield int(holder.getsockname()[1])


@pytest.mark.tour
def test_tensorboard_prometheus_and_wandb_read_back_the_events(tmp_path):
    prometheus = tmp_path / "hpctrain.prom"
    run_file = write_run(
        tmp_path,
        task=SLOW,
        task_args={"step_s": 0},
        train={"steps": 40, "global_batch": 16},
        track={"tensorboard": True, "prometheus": str(prometheus), "wandb": "waves"},
    )
    hpctrain("train", run_file, cwd=tmp_path, warm="torch", env={"WANDB_MODE": "offline"})
    run = tmp_path / "runs/run"

    board = run_python(READ_BOARD, str(run / "tensorboard"))
    np.testing.assert_allclose(board["train/loss"], losses(run), rtol=1e-6)  # TensorBoard keeps float32
    assert "validation/loss" in board

    found = run_python(READ_WANDB, str(run / "wandb"))
    about = json.loads((run / "run.json").read_text())
    assert found["history"] == losses(run)
    assert (found["project"], found["id"], found["config"]["seed"]) == ("waves", about["id"], 0)
    assert found["config"]["data_read"]["fingerprint"] == about["data"]["fingerprint"]

    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(prometheus.read_text())}
    (sample,) = families["hpctrain_train_loss"].samples
    assert sample.labels == {"run": "run"}
    assert sample.value == losses(run)[-1][1]
    assert families["hpctrain_finished"].samples[0].value == 1


def test_mlflow_in_a_folder_goes_on_with_the_same_run_after_a_resume(tmp_path):
    uri, data = tmp_path / "tracking", table(tmp_path)
    run_file = write_run(
        tmp_path,
        task=SLOW,
        task_args={"data": str(data), "step_s": 0.2, "until": str(tmp_path / "over")},
        train={"steps": 300, "global_batch": 16},
        track={"mlflow": str(uri), "every_steps": 5},
    )
    run = tmp_path / "runs/run"
    command = [sys.executable, "-m", "hpctrain", "train", str(run_file)]
    environment = mpi.rank_environment({"PYTHONPATH": str(PROJECT)})
    with open(tmp_path / "first.log", "wb") as log:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    wait_for("training", lambda: len(events(run, "train")) > 5)
    (run / "STOP").touch()
    assert first.wait(PATIENCE_S) == 75
    (tmp_path / "over").touch()  # makes the steps fast
    hpctrain("train", run_file, cwd=tmp_path, warm="torch")
    found = run_python(READ_BACK, f"sqlite:///{uri}/mlflow.db")
    assert found["metrics"]["train/loss"] == losses(run)
    assert found["params"]["train.steps"] == "300"
    assert found["status"] == "FINISHED"
    assert "run.yaml" in found["artifacts"]
    (source,) = json.loads((run / "run.json").read_text())["data"]["sources"]
    assert (source["rows"], source["schema"]["x"], source["files"]) == (64, "list<element: float>", 1)
    assert found["inputs"] == [[str(data), source["files_sha256"][:36]]]


def test_a_server_that_dies_in_mid_run_costs_nothing_and_is_made_whole(tmp_path, port):
    uri = f"http://127.0.0.1:{port}"
    over = tmp_path / "over"  # makes the steps fast once it exists
    run_file = write_run(
        tmp_path,
        task=SLOW,
        task_args={"step_s": 0.2, "until": str(over)},
        train={"steps": 1000, "global_batch": 16},
        track={"mlflow": uri, "every_steps": 5},
    )
    run = tmp_path / "runs/run"
    with mlflow_server(tmp_path, port):
        command = [sys.executable, "-m", "hpctrain", "train", str(run_file)]
        environment = mpi.rank_environment({"PYTHONPATH": str(PROJECT)})
        with open(tmp_path / "train.log", "wb") as log:
            training = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        wait_for("metrics at the server", lambda: sent(run) > 0)
    wait_for("complaint", lambda: "does not accept the metrics" in (tmp_path / "train.log").read_text())
    assert training.poll() is None, "the run must outlive the server for this test to mean anything"
    over.touch()
    assert training.wait(PATIENCE_S) == 0
    times = [event["time"] for event in events(run, "train")]
    assert max(np.diff(times)) < 10.0, "an interval of 1 s may not wait for a server, whose clients try for minutes"
    lost = hpctrain("track", "sync", run, cwd=tmp_path, code=70)
    assert "start the server" in lost.stderr
    with mlflow_server(tmp_path, port):
        hpctrain("track", "sync", run, cwd=tmp_path)
        found = run_python(READ_BACK, uri)
    assert found["metrics"]["train/loss"] == losses(run)
    assert found["status"] == "FINISHED"


def sent(run: Path) -> int:
    try:
        return int(json.loads((run / "mlflow.json").read_bytes())["offset"])
    except (OSError, ValueError):
        return 0
