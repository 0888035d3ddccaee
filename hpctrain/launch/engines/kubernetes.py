"""A Kubernetes cluster as a scheduler, through kubectl; see ``launch.engines.scheduler``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed
from hpctrain.launch.engines import kubernetes_manifest as manifest
from hpctrain.launch.engines.jobs import Plan, SubmitOptions
from hpctrain.launch.engines.kubernetes_manifest import KINDS, ObjectKind
from hpctrain.launch.engines.scheduler import TIMEOUT_S, Scheduler, ask, end_each, submit_one
from hpctrain.launch.runners.ticket import KEY, KEY_BYTES
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import QueueEntry
from hpctrain.system import safe_read

CREATE = ("create", "--validate=strict", "-f", "-")
MANIFEST = "job.yaml"
TRAIN_JOB = ".trainjob"
"""Suffix of jobs that are TrainJobs; no object's name can end with it."""


class Kubernetes(Scheduler):
    """Kubernetes. A job is [NAMESPACE/]NAME, with TRAIN_JOB appended for a TrainJob."""

    name = "kubernetes"
    title = "Kubernetes"
    ends_gently = True

    def plan(self, config: Config, run: RunDir, options: SubmitOptions) -> Plan:
        """Returns a plan with a manifest; the one written to the run folder does not contain the key."""
        options.refuse(self.title)
        name = f"{config.name}-{secrets.token_hex(3)}"  # unique, also among deleted objects
        key = os.environ.get(KEY) or secrets.token_hex(KEY_BYTES)
        shown, sent = (manifest.text(manifest.objects(config, name, str(run.path), each)) for each in ("", key))
        return Plan(
            dataclasses.replace(config, run_dir=str(run.path)), run, shown, name=MANIFEST, secret=sent, job=name
        )

    def command(self, planned: Plan) -> Sequence[str]:
        """Returns the kubectl command, which reads the manifest with the key from standard input."""
        return ["kubectl", *CREATE]

    def submit(self, planned: Plan) -> tuple[list[str], Sequence[str]]:
        """Submits with kubectl create, which does not change existing objects."""
        given = planned.config.launch.kubernetes
        name = planned.job + (TRAIN_JOB if given.kind == "TrainJob" else "")
        job = f"{given.namespace}/{name}" if given.namespace else name

        def send() -> str:
            try:
                kubectl(CREATE, planned.secret)
            except RunFailed:
                with contextlib.suppress(RunFailed):
                    remove(job)
                raise
            return job

        return submit_one(self, planned, send)

    def states(self, jobs: Sequence[Sequence[str]], timeout_s: float, ended: bool) -> Mapping[str, QueueEntry]:
        """Queries the newest job of each run."""
        found = described([each[-1] for each in jobs if each], timeout_s)
        return {job: entry(job, answer) for job, answer in found.items()}

    def end(self, jobs: Sequence[tuple[RunDir, Sequence[str]]]) -> tuple[list[str], list[str]]:
        """Deletes a run's objects: its pods get SIGTERM and their grace period to save a checkpoint."""

        def is_of(run: RunDir, job: str) -> bool:
            about = described([job], TIMEOUT_S).get(job, {}).get("metadata", {})
            return bool(about.get("annotations", {}).get(manifest.RUN_FOLDER) == str(run.path))

        return end_each(jobs, is_of, remove)

    def log(self, run: RunDir, job: str) -> str:
        """Returns the output of pod 0."""
        kind, name, where = parts(job)
        selected = f"{kind.label}={name},batch.kubernetes.io/job-completion-index=0"
        return kubectl(["logs", *where, f"--selector={selected}", "--tail=-1"])


def kubectl(words: Sequence[str], given: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """Runs kubectl; returns what it prints. Raises as ``ask`` does."""
    return ask(["kubectl", *words], given, timeout_s)


def described(jobs: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Returns the cluster's descriptions of known jobs, by job; makes one query per kind and namespace."""
    asked: dict[tuple[str, ...], dict[str, str]] = {}
    found: dict[str, dict[str, Any]] = {}
    for job in jobs:
        kind, name, where = parts(job)
        asked.setdefault((kind.resource, *where), {})[name] = job
    for (resource, *where), names in asked.items():
        said = kubectl(["get", resource, *names, *where, "--ignore-not-found", "--output=json"], timeout_s=timeout_s)
        answer = safe_read.parse_json(said.encode()) if said.strip() else {"items": []}
        found |= {names[each["metadata"]["name"]]: each for each in answer.get("items", [answer])}
    return found


def remove(job: str) -> None:
    """Deletes the objects of a run."""
    kind, name, where = parts(job)
    objects = [f"{each}/{name}" for each in (kind.resource, *kind.others)]
    kubectl(["delete", "--ignore-not-found", "--wait=false", *where, *objects])


def parts(job: str) -> tuple[ObjectKind, str, list[str]]:
    """Splits a job into kind, name, and kubectl's option for its namespace if it has one."""
    given, _, name = job.rpartition("/")
    kind = KINDS["TrainJob" if name.endswith(TRAIN_JOB) else "Job"]
    return kind, name.removesuffix(TRAIN_JOB), [f"--namespace={given}"] if given else []


def entry(job: str, found: Mapping[str, Any]) -> QueueEntry:
    """Returns the state of a Job or TrainJob in Slurm's words, with Kubernetes' reason; pure.

    Args:
        job: the job, as hpctrain names it.
        found: kubectl's description of it.
    """
    status, about = found.get("status", {}), found.get("metadata", {})
    true = {each["type"]: each for each in status.get("conditions", ()) if each.get("status") == "True"}
    state, cause = "PENDING", {}
    if "Complete" in true or "SuccessCriteriaMet" in true:
        state = "COMPLETED"
    elif failed := true.get("Failed") or true.get("FailureTarget"):
        state, cause = "TIMEOUT" if failed.get("reason") == "DeadlineExceeded" else "FAILED", failed
    elif about.get("deletionTimestamp"):
        state = "COMPLETING"
    elif status.get("ready") or any(each.get("ready") for each in status.get("jobsStatus", ())):
        state = "RUNNING"
    elif suspended := true.get("Suspended"):
        cause = suspended
    reason = ": ".join(str(cause[key]) for key in ("reason", "message") if cause.get(key))
    return QueueEntry(job, state, reason, start=str(status.get("startTime", "")))


KUBERNETES = Kubernetes()
