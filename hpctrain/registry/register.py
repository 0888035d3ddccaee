"""A checkpoint's model into MLflow's registry: weights, code, signature and where it all comes from."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint import CheckpointStore, Source, load_initial
from hpctrain.checkpoint.exports import Selection, export_safetensors
from hpctrain.comm.world import alone
from hpctrain.config.combinations import Feature, refusal
from hpctrain.config.loading import load
from hpctrain.config.sections import Config
from hpctrain.data import Samples
from hpctrain.errors import MissingExtra, UserError
from hpctrain.rank.problem import Problem, examples_of, make_problem
from hpctrain.rank.wiring import make_framework
from hpctrain.registry.card import fingerprint, model_card
from hpctrain.run import RunView
from hpctrain.run.events import RunStarted
from hpctrain.run.folder import RunDir
from hpctrain.tasks.definition import first_field
from hpctrain.track.mlflow import position
from hpctrain.track.mlflow_follower import QUIET, artifact_location, tracking_uri
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import Framework

EXAMPLE_SAMPLES = 2


def register_model(run_dir: RunDir, step: int | None, uri: str | None, name: str | None) -> dict[str, Any]:
    """Logs and registers the model of a checkpoint; its name, version and URI.

    The model is loaded with stock MLflow where hpctrain and the framework are installed.

    Args:
        run_dir: the run.
        step: of the checkpoint; by default the newest sound one.
        uri: tracking server or folder; by default that of the run file.
        name: in the registry; by default the run's.

    Raises:
        UserError: no tracking server is known, or there is no such checkpoint.
        MissingExtra: mlflow is not installed.
    """
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    try:
        import mlflow
    except ImportError as error:
        raise MissingExtra("mlflow", "mlflow") from error
    config = load(run_dir.run_yaml)
    uri = uri or config.track.mlflow
    if not uri:
        raise UserError(f"{run_dir.path} was not tracked with MLflow", "name a server or folder with --uri")
    loaded = CheckpointStore(run_dir.checkpoints).load(step)
    mlflow.set_tracking_uri(tracking_uri(uri))
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        export_safetensors(loaded, weights, Selection(averaged=config.train.ema_decay is not None))
        framework, problem = restore(config, str(weights))
        if isinstance(problem.task.model, Mapping):
            raise refusal({Feature.REGISTRY: True, Feature.SEVERAL_MODELS: ", ".join(problem.task.model)})
        batch = example(problem)
        data = RunView(run_dir.path).history()
        started = data.last(RunStarted)
        card = Path(folder) / "model_card.md"
        card.write_text(model_card(data, loaded.step), encoding="utf-8")
        with mlflow.start_run(run_id=open_run(mlflow, run_dir, uri, config)):
            mlflow.log_artifact(str(card))
            info = mlflow.pyfunc.log_model(
                name="model",
                python_model=str(Path(__file__).with_name("served_model.py")),
                artifacts={"weights": str(weights), "run_file": str(run_dir.run_yaml)},
                code_paths=code_of(config.task),
                signature=mlflow.models.infer_signature(batch, framework.predict(batch)),
                pip_requirements=requirements(started.versions if started else {}),
                registered_model_name=name or config.name,
                metadata={"step": loaded.step, "data": fingerprint(data, loaded.step), "run_id": data.run.id},
            )
    return {"name": name or config.name, "version": info.registered_model_version, "uri": info.model_uri}


def restore(config: Config, weights: str) -> tuple[Framework, Problem]:
    """The model of a run file with weights from a safetensors file, on this process alone."""
    where, _, function = config.task.rpartition(":")
    task = config.task
    if where.endswith(".py") and not Path(where).is_file():  # it has travelled with the model, and is on the path
        task = f"{Path(where).stem}:{function}"
    train = dataclasses.replace(config.train, ema_decay=None, compile=False)
    plain = dataclasses.replace(config, task=task, train=train)
    problem = make_problem(plain, alone())
    framework = make_framework(plain, alone(), problem.task, IntervalClock())
    load_initial(Source(weights), framework)
    return framework, problem


def example(problem: Problem) -> Samples:
    """A small batch of what the model takes as input."""
    data = examples_of(problem.train)
    batch = data.read(np.arange(min(EXAMPLE_SAMPLES, len(data)), dtype=np.int64))
    if problem.task.forward is first_field:
        first = next(iter(batch))
        return {first: batch[first]}
    return batch


def open_run(mlflow: Any, run_dir: RunDir, uri: str, config: Config) -> str:
    """The run that the training was tracked as; a new one if it was not tracked there."""
    saved = position(run_dir)
    if saved.get("uri") == uri and saved.get("run_id"):
        return str(saved["run_id"])
    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(config.track.mlflow_experiment)
    place = artifact_location(uri)
    experiment = found.experiment_id if found else client.create_experiment(config.track.mlflow_experiment, place)
    return str(client.create_run(experiment, run_name=config.name).info.run_id)


def code_of(task: str) -> list[str]:
    """The file that a task lies in, so that it travels with the model; none for tasks of installed packages."""
    where = task.rpartition(":")[0]
    return [where] if where.endswith(".py") else []


def requirements(versions: Mapping[str, str | None]) -> list[str]:
    """What the serving environment needs, as it was when the model was trained."""
    wanted = ("hpctrain", "torch", "keras", "tensorflow-cpu", "tensorflow", "numpy")
    found = [f"{name}=={version.partition('+')[0]}" for name in wanted if (version := versions.get(name))]
    return found or [f"python>={sys.version_info.major}.{sys.version_info.minor}"]
