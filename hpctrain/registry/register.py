"""A checkpoint's model into MLflow's registry: weights, code, signature and where it all comes from.

And a model card (Mitchell et al. 2019, in short) from what the run folder knows.
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

from hpctrain.checkpoint.exports.weights import Selection, export_safetensors
from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.config.combinations import Feature, refusal
from hpctrain.config.loading import load
from hpctrain.data.dataset import Samples
from hpctrain.errors import UserError, requires
from hpctrain.rank.problem import Problem, examples_of
from hpctrain.rank.trial import with_weights
from hpctrain.report.summary import summarize
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.events import RunStarted
from hpctrain.run.folder import RunDir
from hpctrain.run.history import RunHistory
from hpctrain.run.view import RunView
from hpctrain.tasks.definition import first_field
from hpctrain.track.follower import position
from hpctrain.track.mlflow import QUIET, experiment_of, tracking_uri

EXAMPLE_SAMPLES = 2

restore = with_weights
"""Models that were registered by earlier versions call it by this name."""


def register_model(run_dir: RunDir, step: int | None, uri: str | None, name: str | None) -> dict[str, Any]:
    """Logs and registers the model of a checkpoint; its name, version and URI.

    The model is loaded with stock MLflow where hpctrain and the framework are installed.

    Args:
        run_dir: the run.
        step: of the checkpoint; by default the newest intact one.
        uri: tracking server or folder; by default that of the run file.
        name: in the registry; by default the run's.

    Raises:
        UserError: no tracking server is known, or there is no such checkpoint.
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
        export_safetensors(loaded, weights, Selection(averaged=config.train.ema_decay is not None))
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
    """A small batch of what the model takes as input."""
    data = examples_of(problem.train)
    batch = data.read(np.arange(min(EXAMPLE_SAMPLES, len(data)), dtype=np.int64))
    if problem.task.forward is first_field:
        first = next(iter(batch))
        return {first: batch[first]}
    return batch


def open_run(mlflow: Any, run_dir: RunDir, uri: str, experiment_name: str, run_name: str) -> str:
    """The run that the training was tracked as; a new one if it was not tracked there."""
    saved = position(run_dir, "mlflow")
    if saved.get("uri") == uri and saved.get("run_id"):
        return str(saved["run_id"])
    client = mlflow.MlflowClient()
    return str(client.create_run(experiment_of(client, experiment_name, uri), run_name=run_name).info.run_id)


def code_of(task: str) -> list[str]:
    """The file that a task lies in, so that it travels with the model; none for tasks of installed packages."""
    where = task.rpartition(":")[0]
    return [where] if where.endswith(".py") else []


def requirements(versions: Mapping[str, str | None]) -> list[str]:
    """What the serving environment needs, as it was when the model was trained."""
    wanted = ("hpctrain", "torch", "keras", "tensorflow-cpu", "tensorflow", "numpy")
    found = [f"{name}=={version.partition('+')[0]}" for name in wanted if (version := versions.get(name))]
    return found or [f"python>={sys.version_info.major}.{sys.version_info.minor}"]


def model_card(data: RunHistory, step: int | None = None) -> str:
    """Markdown: task, data, configuration, metrics, environment, cost. What is unknown is said to be.

    Args:
        data: the run.
        step: of the checkpoint that the card is for; by default the newest.

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
    """``data`` (fingerprint) and ``data_sources`` (tables), as a checkpoint's manifest has them; empty if unknown."""
    try:
        meta = _store(data).manifest(step).meta if step is not None else {}
    except (DamagedCheckpoint, UnreadableCheckpoint, UserError):
        return {}
    identity = meta.get("identity")
    known = identity if isinstance(identity, dict) else {}
    return {key: known[key] for key in ("data", "data_sources") if known.get(key)}


def _store(data: RunHistory) -> CheckpointStore:
    return CheckpointStore(RunDir(data.run.path).checkpoints)
