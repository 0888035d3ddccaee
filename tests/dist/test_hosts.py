"""`hpctrain run` on hosts with separate networks: same weights as a local run, also after losing a rank or host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.snapshots import PREFIX
from hpctrain.errors import Code
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import CUT_OFF
from hpctrain.run.folder import RunDir
from tests.support import netns
from tests.support.command import PROJECT, environment, events, hpctrain, last_words, write_run
from tests.support.gate import Gate
from tests.support.mpi import LAUNCH_S

DIGITS = f"{PROJECT}/tests/tasks/held_torch_digits.py:task"
STEPS = 120

pytestmark = [pytest.mark.world_size(4)]


def run_file(folder: Path, held_at: int = 0, checkpoint: dict[str, Any] | None = None, **launch: Any) -> Path:
    folder.mkdir()
    return write_run(
        folder,
        task=DIGITS,
        run_dir=str(folder / "run"),
        task_args={
            "data": str(folder.parent / "digits"),
            "gate": str(folder.parent / "gate"),
            "at": held_at,
            "pause_s": 0.02,
        },
        train={"steps": STEPS, "global_batch": 32, "threads": 1},
        checkpoint=checkpoint or {"every_steps": 10},
        reduce={"kind": "mpi"},
        track={"every_steps": 1},
        launch=launch,
    )


SKEW = """
import socket, time
if socket.gethostname().endswith("-2"):
    own = time.time
    time.time = lambda: own() + 20.0
"""
"""A sitecustomize.py that sets the clock of the second host ahead."""


def start(network: netns.Network, file: Path) -> subprocess.Popen[str]:
    """Start the command on the first host."""
    (file.parent / "sitecustomize.py").write_text(SKEW)
    interfaces = {name: f"{netns.SUBNET}.0/24" for name in ("PRTE_MCA_prte_if_include", "OMPI_MCA_btl_tcp_if_include")}
    words = network.on(0, sys.executable, "-m", "hpctrain", "run", file)
    found_at = f"{file.parent}{os.pathsep}{PROJECT}"
    more = {"PYTHONPATH": found_at, "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", **interfaces}
    return subprocess.Popen(words, env=environment(more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def hosts(network: netns.Network, **more: Any) -> dict[str, Any]:
    """Keys of ``launch`` for two hosts, unless ``more`` overrides them."""
    return {
        "hosts": network.addresses[:2],
        "ranks_per_node": 2,
        "remote_shell": f"{network.folder}/agent {{host}}",
        **more,
    }


def test_a_host_whose_cable_is_pulled_costs_no_snapshot_and_the_weights_are_those_of_a_local_run(network, tmp_path):
    hpctrain("run", "-n", 4, run_file(tmp_path / "here"), warm="torch")
    run, tiers = tmp_path / "there" / "run", {"memory": {"every_steps": 5, "copies": 1, "path": "$TMPDIR"}}
    shell = f"{network.folder}/agent {{host}} {{command}}"  # in the form that batch systems' tools receive
    more = {"hosts": network.addresses, "spare_nodes": 1, "remote_shell": shell}
    checkpoint, gate = {"every_steps": 1000, "tiers": tiers}, Gate(tmp_path / "gate").close(1)
    child = start(network, run_file(run.parent, 62, checkpoint, **hosts(network, **more)))
    gate.await_ranks(4)
    network.cut(1)
    gate.open()
    said, _ = child.communicate(timeout=LAUNCH_S)
    assert child.returncode == 0, said
    verdict = Attempts(RunDir(run)).all()[0].verdict
    assert verdict is not None and (verdict.code, verdict.host) == (Code.NODE, network.names[1]), said
    told = events(run, "hang")[0]
    assert (told["kind"], {rank["host"] for rank in told["ranks"]}) == (CUT_OFF, {network.names[1]})
    here, there = last_words(tmp_path / "here" / "run"), last_words(run, 2)
    assert [word["host"] for word in there] == [network.names[host] for host in (0, 0, 2, 2)]
    assert {word["weights_hash"] for word in here} == {word["weights_hash"] for word in there}
    [resumed] = events(run, "resumed")
    assert resumed["tier"] == "memory" and resumed["step"] >= 50 and resumed["ranks"] == 4, said
    assert [event["step"] for event in events(run, "train")] == list(range(1, STEPS + 1))
    left = {name: list((network.folder / name).glob(f"{PREFIX}*")) for name in network.names}
    assert not left[network.names[0]] and not left[network.names[2]], "a completed run leaves no snapshot"
