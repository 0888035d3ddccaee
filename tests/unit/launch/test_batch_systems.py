"""In the jobs of batch systems: whose hosts a run gets, and what is said outside of a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hpctrain.config.sections import LaunchConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.batch_systems import SYSTEMS, on_hosts_of_the_job

FILES = {
    "pbs": "n1.site\nn1.site\nn2.site\nn2.site\n",
    "lsf": "n1.site\nn1.site\n\nn2.site\n",
    "gridengine": "n1.site 2 all.q@n1.site UNDEFINED\nn2.site 2 all.q@n2.site UNDEFINED\n",
}


def job(engine: str, folder: Path, text: str) -> Mapping[str, str]:
    """The variables of a job."""
    (folder / "hosts").write_text(text)
    return {SYSTEMS[engine].hosts_file: str(folder / "hosts")}


@pytest.mark.parametrize("engine", FILES)
def test_a_run_gets_each_host_of_its_job_once(engine, tmp_path):
    launch = LaunchConfig(engine=engine, ranks_per_node=2)  # type: ignore[arg-type]
    found = on_hosts_of_the_job(launch, job(engine, tmp_path, FILES[engine]))
    assert found.hosts == ("n1.site", "n2.site") and found.ranks_per_node == 2
    assert "{host}" in found.remote_shell and "{command}" in found.remote_shell


def test_flux_is_asked_for_its_hosts(tmp_path, monkeypatch):
    (tmp_path / "flux").write_text('#!/bin/sh\n[ "$*" = "hostlist --expand instance" ] && echo n1 n2 n3\n')
    (tmp_path / "flux").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert on_hosts_of_the_job(LaunchConfig(engine="flux"), {}).hosts == ("n1", "n2", "n3")


@pytest.mark.parametrize("engine", SYSTEMS)
def test_outside_of_a_job_that_is_said(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    launch = LaunchConfig(engine=engine)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=f"launch.engine is {engine}, and this process is in no {SYSTEMS[engine].title} job: "
    ):
        on_hosts_of_the_job(launch, {})
    if SYSTEMS[engine].hosts_file:
        with pytest.raises(UserError, match="it names no hosts"):
            on_hosts_of_the_job(launch, job(engine, tmp_path, "\n"))


def test_one_place_is_named():
    with pytest.raises(UserError, match=r"launch\.engine is pbs, launch\.hosts \['n1'\]"):
        LaunchConfig(engine="pbs", hosts=("n1",))
    assert on_hosts_of_the_job(LaunchConfig(hosts=("n1",)), {}).hosts == ("n1",)
