"""Trackers, read back with their own readers: TensorBoard, Prometheus, W&B, a real MLflow server that dies mid-run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
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
def test_tensorboard_prometheus_and_wandb_read_back_the_events(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_mlflow_in_a_folder_goes_on_with_the_same_run_after_a_resume(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_server_that_dies_in_mid_run_costs_nothing_and_is_made_whole(tmp_path: Path, port: int) -> None:
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


@contextmanager
def served(
    model: str, registry: Path, environment: dict[str, str], port: int
) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Serve a registered model with stock MLflow; yields a function from inputs to outputs."""
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", model, "--env-manager", "local"]
    environment = {**environment, "MLFLOW_TRACKING_URI": f"sqlite:///{registry}/mlflow.db"}
    with open(registry / "serve.log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def ask(inputs: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps({"inputs": inputs}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return dict(json.load(answer)["predictions"])

    try:
        wait_for("the model's server", lambda: healthy(port, "ping"))
        yield ask
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
def test_a_registered_model_predicts_with_stock_mlflow_as_it_does_here(tmp_path: Path, port: int) -> None:
    data = table(tmp_path)
    run_file = write_run(
        tmp_path, task=SLOW, task_args={"step_s": 0, "data": str(data)}, train={"steps": 40, "global_batch": 16}
    )
    hpctrain("train", run_file, cwd=tmp_path, warm="torch")
    hpctrain("predict", run_file, "-o", tmp_path / "own.h5", cwd=tmp_path, warm="torch")
    answer = hpctrain(
        "track", "register", tmp_path / "runs/run", "--uri", tmp_path / "registry", "--json", cwd=tmp_path
    )
    registered = json.loads(answer.stdout.splitlines()[-1])
    program = (
        "import json, pathlib, h5py, mlflow, numpy as np\n"
        f"mlflow.set_tracking_uri('sqlite:///{tmp_path}/registry/mlflow.db')\n"
        f"model = mlflow.pyfunc.load_model('models:/{registered['name']}/{registered['version']}')\n"
        "x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)\n"
        f"own = h5py.File('{tmp_path}/own.h5')['output'][...]\n"
        "np.testing.assert_array_equal(model.predict({'x': x})['output'], own)\n"
        "about = model.metadata.metadata\n"
        f"assert (about['step'], about['data_sources'][0]['address']) == (40, '{data}')\n"
        f"(path,) = pathlib.Path('{tmp_path}/registry').rglob('run.json')\n"
        "assert json.loads(path.read_text())['data']['fingerprint'] == about['data']\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = mpi.rank_environment({"PYTHONPATH": str(PROJECT)})
    result = mpi.run_in_group([sys.executable, "-c", program], environment, elsewhere, 120)
    assert result.returncode == 0, result.output
    with served(
        f"models:/{registered['name']}/{registered['version']}", tmp_path / "registry", environment, port
    ) as ask:
        x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        with h5py.File(tmp_path / "own.h5") as own:
            # The answer is decimal text.
            np.testing.assert_allclose(ask({"x": x.tolist()})["output"], own["output"][...], rtol=1e-6)
