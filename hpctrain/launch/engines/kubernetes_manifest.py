"""The Kubernetes objects of a run: an Indexed Job, the headless Service of its pods, and a Secret. Pure.

With Kubeflow, a TrainJob creates such a Job and Service from a TrainingRuntime.

Pod 0 runs the supervisor; every pod, including pod 0, is a node that connects to it. The Secret holds the nodes' key
and the run file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from hpctrain.config.kubernetes_pod import check_pod
from hpctrain.config.loading import dump
from hpctrain.config.sections import Config
from hpctrain.errors import ExitCode, UserError
from hpctrain.launch.engines.slurm.render import templates
from hpctrain.launch.runners.ticket import ADDRESS, KEY
from hpctrain.run.rank_environment import JOB, START

LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
QUANTITY = r"\d{1,12}(\.\d{1,3})?(m|k|[MGTPE]|[KMGTPE]i)?"
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
"""Patterns of valid values, by key."""
NAME = r"[a-z]([a-z0-9-]*[a-z0-9])?"
"""Pattern of a valid run name."""
FOLDER = re.compile(r"(/[\w.@+-]+)+", re.ASCII)
OWN_FOLDERS = ("/dev", "/proc", "/sys", "/etc", "/scratch")
OURS = ("containers", "volumes", "subdomain", "restartPolicy", "terminationGracePeriodSeconds", "securityContext")
"""Fields of a pod's spec that hpctrain sets itself."""
RUN_FILE = PurePosixPath("/etc/hpctrain/config.yaml")
RUN_FOLDER = "hpctrain/run-folder"
"""Annotation with the run folder on the submitting machine."""
COMMAND = f"""\
trap 'exit 143' TERM
serve() {{
  until [ "$gone" ]; do
    hpctrain node --wait 86400 &
    node=$!
    [ -z "$gone" ] || kill -USR1 $node
    while kill -0 $node 2>/dev/null; do wait $node; done
    sleep 1
  done
  exit 143
}}
if [ "$JOB_COMPLETION_INDEX" != 0 ]; then
  trap 'gone=1; kill -USR1 "$node" 2>/dev/null' TERM
  serve
fi
serve &
export {START}=$(date +%s)
exec hpctrain run {RUN_FILE}
"""
"""Shell script of each pod. A node that has lost its supervisor waits for the next one. When a pod is to end, its node
informs the supervisor, and the shell, with which the container would end, stays until the ranks have saved."""
SPARE_S = 15.0
"""Seconds by which a pod's grace period must exceed the ranks': to inform them, and to end after them."""


@dataclass(frozen=True)
class ObjectKind:
    """Kind of a run's main object."""

    resource: str
    """Name of the resource for kubectl."""
    others: tuple[str, ...]
    """Resources of the run's other objects, which have the same name."""
    label: str
    """Label of its pods whose value is the object's name."""
    pod_0: str
    """Template of pod 0's host name."""
    longest: int
    """Maximum length of a run's name: Kubernetes appends numbers for pods and allows 63 characters in all."""


KINDS: Mapping[str, ObjectKind] = {
    "Job": ObjectKind("job", ("service", "secret"), "batch.kubernetes.io/job-name", "{job}-0", 50),
    "TrainJob": ObjectKind(
        resource="trainjob.trainer.kubeflow.org",
        others=("trainingruntime.trainer.kubeflow.org", "secret"),
        label="jobset.sigs.k8s.io/jobset-name",
        pod_0="{job}-node-0-0",
        longest=38,
    ),
}


def check(config: Config) -> None:
    """Raises UserError, naming the key, if Kubernetes cannot take a value."""
    given = config.launch.kubernetes

    def refuse(key: str, value: object, fix: str) -> None:
        raise UserError(f"{key} is {value!r}, which Kubernetes cannot take", fix)

    longest = KINDS[given.kind].longest
    if not re.fullmatch(NAME, config.name) or len(config.name) > longest:
        refuse("name", config.name, f"use up to {longest} lowercase letters, digits and '-', beginning with a letter")
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
    if given.grace_s < config.launch.stop_grace_s + SPARE_S:
        ranks = f"launch.stop_grace_s {config.launch.stop_grace_s:g}"
        what = f"launch.kubernetes.grace_s {given.grace_s} is too short for {ranks}"
        raise UserError(what, f"leave {SPARE_S:g} s between them: pods end after their ranks have saved")
    if wrong := [key for key in given.pod if key in OURS]:
        raise UserError(f"launch.kubernetes.pod has {wrong[0]}, which hpctrain writes", "leave it out")
    check_pod(given)
    if config.launch.modules or config.launch.setup:
        raise UserError("launch.modules and launch.setup are not for pods", "put what they load into the image")


def objects(config: Config, job: str, folder: str, key: str) -> list[dict[str, Any]]:
    """Returns the objects to create, in order.

    Args:
        config: the run.
        job: name of the objects.
        folder: run folder on the submitting machine.
        key: the nodes' key in hexadecimal digits; empty leaves it out.

    Raises:
        UserError: see ``check``.
    """
    check(config)
    given, launch = config.launch.kubernetes, config.launch
    about: dict[str, Any] = {"name": job, "labels": {"app.kubernetes.io/name": "hpctrain"}}
    about |= {"namespace": given.namespace} if given.namespace else {}
    queue = {"kueue.x-k8s.io/queue-name": given.queue} if given.queue else {}
    threads = (launch.ranks_per_node or given.gpus or 1) * (config.train.threads or 1)
    limits = {"cpu": given.cpus or str(threads)}
    limits |= {"memory": given.memory} if given.memory else {}
    limits |= {given.gpu_resource: str(given.gpus)} if given.gpus else {}
    made = (
        templates()
        .get_template("kubernetes.yaml.j2")
        .render(
            given=given,
            nodes=launch.nodes + launch.spare_nodes,
            about=about,
            annotated=about | {"labels": about["labels"] | queue, "annotations": {RUN_FOLDER: folder}},
            secret={"config.yaml": dump(in_pods(config))} | ({"key": key} if key else {}),
            pod={"automountServiceAccountToken": False, "enableServiceLinks": False, **given.pod},
            limits=limits,
            label=KINDS["Job"].label,
            address=f"{KINDS[given.kind].pod_0.format(job=job)}.{job}:{given.port}",
            variables={"key": KEY, "address": ADDRESS, "job": JOB},
            command=COMMAND,
            run_file=RUN_FILE,
            final=[int(ExitCode.USER_ERROR), int(ExitCode.DO_NOT_REQUEUE)],
        )
    )
    return list(yaml.safe_load_all(made))


def in_pods(config: Config) -> Config:
    """Returns the run as its pods read it: with ``runners``, and a run folder on a volume (by default the first)."""
    launch = dataclasses.replace(config.launch, engine="runners", ticket=None)
    folder = PurePosixPath(config.run_dir or "runs")
    held = any(folder.is_relative_to(each) for each in launch.kubernetes.volumes)
    run_dir = folder if held else PurePosixPath(next(iter(launch.kubernetes.volumes)), config.name)
    return dataclasses.replace(config, run_dir=str(run_dir), launch=launch)


def text(objects: Sequence[dict[str, Any]]) -> str:
    """Returns the objects as YAML, in ASCII."""
    return yaml.safe_dump_all(objects, sort_keys=False)
