"""A model card (Mitchell et al. 2019, in short) from what the run folder knows."""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2

from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import UserError
from hpctrain.report.summary import summarize
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.folder import RunDir
from hpctrain.run.history import RunHistory


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
        finished=_date(newest.ended),
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


def _date(seconds: float | None) -> str | None:
    return None if not seconds else datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d")
