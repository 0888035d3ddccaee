"""The objects of a run on Kubernetes, pure: an Indexed Job, the headless Service of its pods, and a Secret.

Pod 0 supervises; every pod, pod 0 too, is a node that dials home. The Secret holds the nodes' key and the run file.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from hpctrain.config.loading import dump
from hpctrain.config.sections import Config, KubernetesConfig
from hpctrain.errors import ExitCode, UserError
from hpctrain.launch.runners.ticket import ADDRESS, KEY
from hpctrain.run.rank_environment import JOB, START

LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
QUANTITY = r"\d{1,12}(\.\d{1,3})?(m|[kMGTPE]i?|Ki)?"
PATTERNS = {
    "image": r"[A-Za-z0-9][\w./:@-]{0,254}",
    "namespace": LABEL,
    "cpus": QUANTITY,
    "memory": QUANTITY,
    "shared_memory": QUANTITY,
    "scratch": QUANTITY,
    "gpu_resource": rf"{SUBDOMAIN}/[A-Za-z0-9]([\w.-]{{0,61}}[A-Za-z0-9])?",
    "queue": LABEL,
}
"""What values must be, by their keys."""
NAME = r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?"
"""Of a run: it names its pods' hosts, too, with a number at the end."""
FOLDER = re.compile(r"(/[\w.@+-]+)+", re.ASCII)
OWN_FOLDERS = ("/dev", "/proc", "/sys", "/etc", "/scratch")
OURS = ("containers", "volumes", "subdomain", "restartPolicy", "terminationGracePeriodSeconds", "securityContext")
"""Fields of a pod's spec that are written here."""
RUN_FILE = "/etc/hpctrain/config.yaml"
RUN_FOLDER = "hpctrain/run-folder"
"""Annotation with the folder that the run was submitted from."""
COMMAND = f"""\
trap exit TERM
while :; do hpctrain node --wait 86400; sleep 1; done &
[ "$JOB_COMPLETION_INDEX" = 0 ] || wait
export {START}=$(date +%s)
exec hpctrain run {RUN_FILE}
"""
"""Of each pod. A node that has lost its supervisor waits for the next one."""


def check(config: Config) -> None:
    """Raises UserError: a value that Kubernetes cannot take, by its key."""
    given = config.launch.kubernetes

    def refuse(key: str, value: object, fix: str) -> None:
        raise UserError(f"{key} is {value!r}, which Kubernetes cannot take", fix)

    if not re.fullmatch(NAME, config.name):
        refuse("name", config.name, "use up to 50 lowercase letters, digits and '-', beginning with a letter")
    for key, pattern in PATTERNS.items():
        value = getattr(given, key)
        if value is not None and not re.fullmatch(pattern, value, re.ASCII):
            refuse(f"launch.kubernetes.{key}", value, "see the key's description in the table of the run file")
    if given.image is None:
        raise UserError("launch.kubernetes.image names no image", "name one with hpctrain and the task")
    if not given.volumes:
        fix = "name a claim: {/runs: claim}"
        raise UserError("launch.kubernetes.volumes is empty: the run folder has to outlive the pods", fix)
    for folder, claim in given.volumes.items():
        parts = PurePosixPath(folder).parts
        if not FOLDER.fullmatch(folder) or ".." in parts or "/".join(["", *parts[1:2]]) in OWN_FOLDERS:
            refuse("launch.kubernetes.volumes", folder, "mount it at an absolute folder outside /etc, /dev, /scratch")
        if not re.fullmatch(SUBDOMAIN, claim) or len(claim) > 253:
            refuse("launch.kubernetes.volumes", claim, "name a PersistentVolumeClaim")
    if not 1024 <= given.port <= 65535:
        refuse("launch.kubernetes.port", given.port, "take one between 1024 and 65535")
    if wrong := [key for key in given.pod if key in OURS]:
        raise UserError(f"launch.kubernetes.pod has {wrong[0]}, which hpctrain writes", "leave it out")
    if config.launch.modules or config.launch.setup:
        raise UserError("launch.modules and launch.setup are not for pods", "put what they load into the image")


def objects(config: Config, job: str, folder: str, key: str) -> list[dict[str, Any]]:
    """What the cluster is given, in order.

    Args:
        config: the run.
        job: name of the three objects.
        folder: that the run is submitted from.
        key: of the nodes, in hexadecimal digits; empty leaves it out.

    Raises:
        UserError: see ``check``.
    """
    check(config)
    given = config.launch.kubernetes
    queue = {"kueue.x-k8s.io/queue-name": given.queue} if given.queue else {}
    about: dict[str, Any] = {"name": job, "labels": {"app.kubernetes.io/name": "hpctrain"}}
    about |= {"namespace": given.namespace} if given.namespace else {}
    nodes = config.launch.nodes + config.launch.spare_nodes
    annotated = {"labels": about["labels"] | queue, "annotations": {RUN_FOLDER: folder}}
    spec = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": given.restarts,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {"rules": failure_rules()},
        "podReplacementPolicy": "Failed",
        "template": {"metadata": {"labels": about["labels"]}, "spec": pod(config, job)},
    }
    secret = {"config.yaml": dump(in_pods(config))} | ({"key": key} if key else {})
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": job},
    }
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": about, "immutable": True, "stringData": secret},
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": about | annotated, "spec": spec},
    ]


def failure_rules() -> list[dict[str, Any]]:
    """Evictions do not count; what would fail again, and what a person has stopped, ends the job."""
    final = [int(ExitCode.USER_ERROR), int(ExitCode.DO_NOT_REQUEUE)]
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": final}},
    ]


def pod(config: Config, job: str) -> dict[str, Any]:
    """A pod's spec."""
    given, launch = config.launch.kubernetes, config.launch
    threads = (launch.ranks_per_node or given.gpus or 1) * (config.train.threads or 1)
    limits = {"cpu": given.cpus or str(threads)}
    limits |= {"memory": given.memory} if given.memory else {}
    limits |= {given.gpu_resource: str(given.gpus)} if given.gpus else {}
    mounts = {**{folder: f"volume-{number}" for number, folder in enumerate(given.volumes)}, "/dev/shm": "shm"}
    volumes: list[dict[str, Any]] = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(given.volumes.values())
    ]
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": given.shared_memory}})
    volumes.append(
        {"name": "run-file", "secret": {"secretName": job, "items": [{"key": "config.yaml", "path": "config.yaml"}]}}
    )
    env: list[dict[str, Any]] = [
        {"name": KEY, "valueFrom": {"secretKeyRef": {"name": job, "key": "key"}}},
        {"name": ADDRESS, "value": f"{job}-0.{job}:{given.port}"},
        {"name": JOB, "value": job},
    ]
    if given.scratch:
        volumes.append({"name": "scratch", "emptyDir": {"sizeLimit": given.scratch}})
        mounts["/scratch"] = "scratch"
        env.append({"name": "TMPDIR", "value": "/scratch"})
    container = {
        "name": "node",
        "image": given.image,
        "command": shlex.split("sh -c"),
        "args": [COMMAND],
        "env": env,
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            *({"name": name, "mountPath": folder} for folder, name in mounts.items()),
            {"name": "run-file", "mountPath": str(PurePosixPath(RUN_FILE).parent), "readOnly": True},
        ],
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **given.pod,
        "subdomain": job,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": given.grace_s,
        "securityContext": security(given),
        "containers": [container],
        "volumes": volumes,
    }


def security(given: KubernetesConfig) -> dict[str, Any]:
    """That of Kubernetes' restricted profile, unless root is asked for."""
    user = {"runAsUser": given.user, "runAsGroup": given.user, "fsGroup": given.user}
    return {"runAsNonRoot": given.user != 0, **user, "seccompProfile": {"type": "RuntimeDefault"}}


def in_pods(config: Config) -> Config:
    """The run as its pods read it: nodes dial home, and the run folder is on the first volume."""
    launch = dataclasses.replace(config.launch, engine="runners", ticket=None)
    folder = PurePosixPath(config.run_dir or "runs")
    held = any(folder.is_relative_to(each) for each in launch.kubernetes.volumes)
    run_dir = folder if held else PurePosixPath(next(iter(launch.kubernetes.volumes)), config.name)
    return dataclasses.replace(config, run_dir=str(run_dir), launch=launch)


def text(objects: Sequence[dict[str, Any]]) -> str:
    """As YAML."""
    return yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True)
