"""Registers a checkpoint's model in MLflow: weights, code, signature and provenance.

Also writes a short model card (after Mitchell et al. 2019) from the run folder.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from hpctrain.checkpoint.export import export_safetensors
from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.config.combinations import refusal
from hpctrain.config.features import Feature
from hpctrain.config.loading import load
from hpctrain.data.dataset import Samples
from hpctrain.errors import UserError, requires
from hpctrain.rank.problem import Problem, examples_of
from hpctrain.rank.trial import with_weights
from hpctrain.report.summary import summarize
from hpctrain.run.attempts import Attempt
from hpctrain.run.events import RunStarted
from hpctrain.run.folder import RunDir
from hpctrain.run.history import RunHistory
from hpctrain.run.run_view import RunView
from hpctrain.track.follower import position
from hpctrain.track.mlflow import QUIET, experiment_of, tracking_uri

EXAMPLE_SAMPLES = 2


def register_model(run_dir: RunDir, step: int | None, uri: str | None, name: str | None) -> dict[str, Any]:
    """Logs and registers the model of a checkpoint; returns its name, version and URI.

    The model can be loaded with stock MLflow wherever hpctrain and the framework are installed.

    Args:
        run_dir: the run.
        step: step of the checkpoint; by default the newest intact one.
        uri: tracking server or folder; by default that of the run file.
        name: name in the registry; by default the run's.

    Raises:
        UserError: no tracking server is known, there is no such checkpoint, or the task has several models.
        MissingExtra: mlflow is not installed.
    """
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    with requires("mlflow", "mlflow"):
        import mlflow
    config = load(run_dir.run_yaml)
    uri = uri or config.track.mlflow
    if not uri:
        raise UserError(f"{run_dir.path} was not tracked with MLflow", "name a server or folder with --uri")
    loaded = CheckpointStore(run_dir.checkpoints).load(step)
    mlflow.set_tracking_uri(tracking_uri(uri))
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        export_safetensors(loaded, weights)
        framework, problem = with_weights(config, str(weights))
        if isinstance(problem.task.model, Mapping):
            raise refusal({Feature.REGISTRY: True, Feature.SEVERAL_MODELS: ", ".join(problem.task.model)})
        batch = example(problem)
        data = RunView(run_dir.path).history()
        started = data.last(RunStarted)
        card = Path(folder) / "model_card.md"
        card.write_text(model_card(data, loaded.step), encoding="utf-8")
        with mlflow.start_run(run_id=open_run(mlflow, run_dir, uri, config.track.mlflow_experiment, config.name)):
            mlflow.log_artifact(str(card))
            info = mlflow.pyfunc.log_model(
                name="model",
                python_model=str(Path(__file__).with_name("served_model.py")),
                artifacts={
                    "weights": str(weights),
                    "run_file": str(run_dir.run_yaml),
                    "run_record": str(run_dir.run_json),
                },
                code_paths=code_of(config.task),
                signature=mlflow.models.infer_signature(batch, framework.predict(batch)),
                pip_requirements=requirements(started.versions if started else {}),
                registered_model_name=name or config.name,
                metadata={"step": loaded.step, "run_id": data.run.id, **trained_on(data, loaded.step)},
            )
    return {"name": name or config.name, "version": info.registered_model_version, "uri": info.model_uri}


def example(problem: Problem) -> Samples:
    """A small batch of the model's input."""
    data = examples_of(problem.train)
    batch = data.read(np.arange(min(EXAMPLE_SAMPLES, len(data)), dtype=np.int64))
    names = problem.loading.recipe.names[:1]  # of what the model gets, if only one array
    return {name: batch[name] for name in names} or batch


def open_run(mlflow: Any, run_dir: RunDir, uri: str, experiment_name: str, run_name: str) -> str:
    """Id of the MLflow run that tracked the training; creates one if it was not tracked there."""
    saved = position(run_dir, "mlflow")
    if saved.get("uri") == uri and saved.get("run_id"):
        return str(saved["run_id"])
    client = mlflow.MlflowClient()
    return str(client.create_run(experiment_of(client, experiment_name, uri), run_name=run_name).info.run_id)


def code_of(task: str) -> list[str]:
    """The task's file, to be stored with the model; empty for tasks of installed packages."""
    where = task.rpartition(":")[0]
    return [where] if where.endswith(".py") else []


def requirements(versions: Mapping[str, str | None]) -> list[str]:
    """Packages that the serving environment needs, in the versions used for training."""
    wanted = ("hpctrain", "torch", "keras", "tensorflow-cpu", "tensorflow", "numpy")
    found = [f"{name}=={version.partition('+')[0]}" for name in wanted if (version := versions.get(name))]
    return found or [f"python>={sys.version_info.major}.{sys.version_info.minor}"]


def model_card(data: RunHistory, step: int | None = None) -> str:
    """Renders a model card in Markdown: task, data, configuration, metrics, environment, cost.

    Args:
        data: the run.
        step: step of the card's checkpoint; by default the newest.

    Raises:
        UserError: there is no such checkpoint.
    """
    run = data.run
    if step is not None and step not in _store(data).steps():
        has_some = run.checkpoint_step is not None
        fix = "hpctrain ckpt ls shows what there is" if has_some else "train until one is saved"
        raise UserError(f"{run.path} has no checkpoint of step {step}", fix)
    step = run.checkpoint_step if step is None else step
    summary = summarize(data)
    newest = run.newest or Attempt()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpctrain.registry"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("card.md.j2").render(
        summary=summary,
        config=run.config,
        step=step,
        fingerprint=trained_on(data, step).get("data"),
        sources=trained_on(data, step).get("data_sources") or (),
        git_commit=newest.git_commit,
        finished=datetime.datetime.fromtimestamp(newest.ended, datetime.UTC).strftime("%Y-%m-%d")
        if newest.ended
        else None,
        task_args=json.dumps(run.config.get("task_args") or {}),
    )


def trained_on(data: RunHistory, step: int | None) -> dict[str, Any]:
    """``data`` (fingerprint) and ``data_sources`` (tables) from a checkpoint's manifest; empty if unknown."""
    try:
        meta = _store(data).manifest(step).meta if step is not None else {}
    except (DamagedCheckpoint, UnreadableCheckpoint, UserError):
        return {}
    identity = meta.get("identity")
    known = identity if isinstance(identity, dict) else {}
    return {key: known[key] for key in ("data", "data_sources") if known.get(key)}


def _store(data: RunHistory) -> CheckpointStore:
    return CheckpointStore(RunDir(data.run.path).checkpoints)
