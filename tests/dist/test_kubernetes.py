"""The containers of a rendered Kubernetes Job, run on hosts with separate networks instead of a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.config.sections import Config, KubernetesConfig, LaunchConfig
from hpctrain.launch.engines import kubernetes_manifest as manifest
from hpctrain.run.folder import RunDir
from hpctrain.run.stop_request import StopRequest, request_stop
from tests.support import netns
from tests.support.command import environment, wait_for
from tests.support.mpi import LAUNCH_S

pytestmark = [pytest.mark.world_size(3)]

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["PMIX_RANK"])
phase = (folder / "phase").read_text()
def stop(number, frame):
    (folder / f"told-{rank}").touch()
    while not all((folder / f"told-{other}").exists() for other in range(3)):
        time.sleep(0.01)
    (folder / f"saved-{rank}").touch()
    if rank == 0:
        (folder / "phase").write_text("again")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(folder / f"{phase}-{rank}").touch()
while not all((folder / f"{phase}-{other}").exists() for other in range(3)):
    time.sleep(0.01)
if phase == "wait":
    time.sleep(600)
if phase == "again" and rank == 0:
    (folder / "phase").write_text("finish")
sys.exit({"again": 75, "finish": 0, "fail": 3}[phase])
"""


class StandIn:
    """Does what Kubernetes' Job controller and kubelet do with a manifest, as far as these tests need it.

    Attributes:
        codes: exit codes of pods that have ended, by index.
        failures: number of failures that count.
    """

    def __init__(self, objects: list[dict[str, Any]], network: netns.Network, folder: Path) -> None:
        secret, service, self.job = objects
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": self.job["metadata"]["name"]}
        self.spec = self.job["spec"]
        self.network = network
        self.secret = secret["stringData"]
        self.run_file = folder / "config.yaml"
        self.run_file.write_text(self.secret["config.yaml"])
        (folder / "hpctrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m hpctrain "$@"\n')
        (folder / "hpctrain").chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        self.disrupted: set[int] = set()
        self.codes: list[tuple[int, int]] = []
        self.failures = 0

    def start(self, index: int) -> None:
        """Start a pod with the container's command and variables."""
        (container,) = self.spec["template"]["spec"]["containers"]
        name = self.job["metadata"]["name"]
        given = {
            each["name"]: each.get("value") or self.secret[each["valueFrom"]["secretKeyRef"]["key"]]
            for each in container["env"]
        }
        resolved = {key: value.replace(f"{name}-0.{name}", self.network.addresses[0]) for key, value in given.items()}
        script = container["args"][0].replace(str(manifest.RUN_FILE), str(self.run_file))
        env = environment({**INTERFACES, **resolved, "JOB_COMPLETION_INDEX": str(index), "PATH": self.path})
        words = self.network.on(index, "exec", *container["command"], script)
        self.pods[index] = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL)

    def end(self, *pods: int) -> None:
        """End pods: SIGTERM, the grace period, then SIGKILL for what is left once the first process has ended."""
        for index in pods:
            self.pods[index].send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.spec["template"]["spec"]["terminationGracePeriodSeconds"]
        left = set(pods)
        while left:
            over = time.monotonic() > deadline
            for index in [each for each in left if over or self.pods[each].poll() is not None]:
                self.pods[index].kill()
                netns._end_processes([self.network.names[index]])
                left.remove(index)
            time.sleep(0.01)

    def evict(self, index: int) -> None:
        self.disrupted.add(index)
        self.end(index)

    def look(self) -> str:
        """Act on pods that have ended; return how the Job ended, or an empty string."""
        for index, pod in list(self.pods.items()):
            code = pod.poll()
            if code is None:
                continue
            netns._end_processes([self.network.names[index]])
            self.codes.append((index, code))
            action = "" if code == 0 else self.action(index, code)
            if code == 0 and str(index) in self.spec["successPolicy"]["rules"][0]["succeededIndexes"].split(","):
                return "Complete"
            if action == "FailJob":
                return "PodFailurePolicy"
            self.failures += action == "Count"
            if self.failures > self.spec["backoffLimit"]:
                return "BackoffLimitExceeded"
            self.disrupted.discard(index)
            self.start(index)
        return ""

    def action(self, index: int, code: int) -> str:
        """Action of the first rule of the pod failure policy that matches a pod."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule and index in self.disrupted:
                return str(rule["action"])
            if "onExitCodes" in rule and code in rule["onExitCodes"]["values"]:
                return str(rule["action"])
        return "Count"

    def finish(self, patience_s: float = LAUNCH_S) -> str:
        """Wait for the end of the Job, and return how it ended."""
        end = time.monotonic() + patience_s
        while not (ended := self.look()):
            assert time.monotonic() < end, self.codes
            time.sleep(0.05)
        return ended

    def close(self) -> None:
        """End all pods, as when the Job is deleted."""
        self.end(*(index for index, pod in self.pods.items() if pod.poll() is None))


INTERFACES = {
    **{name: f"{netns.SUBNET}.0/24" for name in ("PRTE_MCA_prte_if_include", "OMPI_MCA_btl_tcp_if_include")},
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
}


def cluster(network: netns.Network, folder: Path, phase: str, **pods: Any) -> StandIn:
    """A Job of three pods with one rank each."""
    runs = folder / "runs"
    for made in (runs, folder / "image"):
        made.mkdir()
    (runs / "phase").write_text(phase)
    program = folder / "image" / "program.py"
    program.write_text(PROGRAM)
    kubernetes = KubernetesConfig(image="train", volumes={str(runs): "claim"}, grace_s=100, **pods)
    command = (sys.executable, str(program), str(runs))
    launch = LaunchConfig(
        engine="kubernetes", nodes=3, command=command, kubernetes=kubernetes, max_failures=0, stop_grace_s=45.0
    )
    objects = manifest.objects(Config(name="pods", launch=launch), "pods-abc123", "/here", "ab" * 32)
    made_job = StandIn(list(yaml.safe_load_all(manifest.text(objects))), network, folder / "image")
    for index in range(made_job.spec["completions"]):
        made_job.start(index)
    return made_job


@pytest.mark.parametrize("index", [0, 1])
def test_a_job_survives_an_eviction_and_runs_again_until_it_is_done(
    index: int, network: netns.Network, tmp_path: Path
) -> None:
    job = cluster(network, tmp_path, "wait")
    try:
        wait_for("ranks", lambda: all((tmp_path / "runs" / f"wait-{rank}").exists() for rank in range(3)))
        job.evict(index)
        assert all((tmp_path / "runs" / f"saved-{rank}").exists() for rank in range(3))
        assert job.finish() == "Complete", job.codes
    finally:
        job.close()
    assert [each for each in job.codes if each[0] == 0] == [(0, 75), (0, 75), (0, 0)]
    assert [each for each in job.codes if each[0] != 0] == [(1, 143)] * index and job.failures == 1 + index


def test_all_ranks_save_when_the_job_is_deleted(network: netns.Network, tmp_path: Path) -> None:
    job = cluster(network, tmp_path, "wait")
    try:
        wait_for("ranks", lambda: all((tmp_path / "runs" / f"wait-{rank}").exists() for rank in range(3)))
    finally:
        job.close()
    assert all((tmp_path / "runs" / f"saved-{rank}").exists() for rank in range(3))
    assert [job.pods[index].returncode for index in range(3)] == [75, 143, 143]


def test_a_failure_uses_up_the_budget_and_a_persons_stop_ends_the_job(network: netns.Network, tmp_path: Path) -> None:
    (tmp_path / "fails").mkdir()
    job = cluster(network, tmp_path / "fails", "fail", restarts=0)
    try:
        assert job.finish() == "BackoffLimitExceeded", job.codes
    finally:
        job.close()
    assert [index for index, _ in job.codes] == [0]
    (tmp_path / "stops").mkdir()
    job = cluster(network, tmp_path / "stops", "wait")
    runs = tmp_path / "stops" / "runs"
    try:
        wait_for("ranks", lambda: all((runs / f"wait-{rank}").exists() for rank in range(3)))
        request_stop(RunDir(runs / "pods"), StopRequest("someone@here"))
        assert job.finish() == "PodFailurePolicy" and job.codes == [(0, 76)]
    finally:
        job.close()
