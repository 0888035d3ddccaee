"""The loss of the first node, which runs the supervisor, in a job that Slurm keeps when a node is lost."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hpctrain.config.sections import Config, LaunchConfig
from hpctrain.errors import Code, RunFailed
from hpctrain.launch.engines.slurm import client, standby
from hpctrain.launch.engines.slurm.allocation import JobNodes
from hpctrain.launch.engines.slurm.job import Job
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import STALE_S, LiveLock, myself
from hpctrain.run.verdict import Action
from tests.support.faults import FileServer

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n2", "SLURM_NTASKS": "1"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose supervisor on n1, in job 7, has been silent for long; n1 cannot be reached."""
    run = RunDir(tmp_path)
    run.create()
    holder = dataclasses.replace(myself(), host="n1.cluster", machine="elsewhere", job="7")
    LiveLock(run, holder).acquire()
    old = run.lock_file.stat().st_mtime - 2 * STALE_S
    os.utime(run.lock_file, (old, old))
    Attempts(run).begin(Attempt(job="7", restarts=0, nodes=2, ranks=2))
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["standby", str(tmp_path)])
    monkeypatch.setattr(client, "unreached", lambda hosts: {"n1"} & set(hosts))
    return run


def test_a_supervisor_is_lost_if_neither_it_nor_its_node_is_heard(run, monkeypatch):
    assert standby.lost_host(run) == "n1"
    monkeypatch.setattr(client, "unreached", lambda hosts: set())
    assert standby.lost_host(run) is None, "it is suspended, or slow"
    monkeypatch.setattr(client, "unreached", set)
    os.utime(run.lock_file)
    assert standby.lost_host(run) is None, "it beats"
    run.lock_file.unlink()
    assert standby.lost_host(run) is None, "it has ended by itself"


@pytest.mark.parametrize(
    ("requeue", "restarts", "cancelled"), [(None, "1", []), (False, "0", ["7"])], ids=["requeued", "next of a chain"]
)
def test_the_job_is_requeued_or_ends(
    run,
    monkeypatch,
    requeue,
    restarts,
    cancelled,
):
    done: list[str] = []
    fields = {"JobState": "RUNNING", "Restarts": "0"}
    slurm = {"requeue": requeue} if requeue is not None else {}
    run.run_yaml.write_text(
        yaml.safe_dump(
            {"name": "r", "run_dir": str(run.path), "launch": {"nodes": 2, "command": ["true"], "slurm": slurm}}
        )
    )
    monkeypatch.setattr(client, "job_fields", lambda job: fields)
    monkeypatch.setattr(client, "requeue", lambda job: fields.update(Restarts="1"))
    monkeypatch.setattr(client, "cancel", lambda jobs, pending_only=False: done.extend(jobs))
    standby.main()
    [attempt] = Attempts(run).all()
    assert attempt.verdict is not None and attempt.verdict.action is Action.REQUEUE
    assert (attempt.verdict.code, attempt.verdict.host) == (Code.NODE, "n1")
    assert "n1 was lost, and the supervisor with it" in attempt.verdict.reason
    assert done == cancelled and fields["Restarts"] == restarts


@pytest.mark.parametrize(
    ("launch", "has_srun", "watched"),
    [
        ({"nodes": 2}, True, False),
        ({"nodes": 2, "min_nodes": 1}, True, True),
        ({"nodes": 2, "min_nodes": 1}, False, False),
        ({"nodes": 2, "spare_nodes": 1}, True, True),
    ],
)
def test_a_job_that_slurm_keeps_is_watched_from_its_last_node(tmp_path, monkeypatch, launch, has_srun, watched):
    begun: list[list[str]] = []
    ended: list[bool] = []

    class Step:
        terminate: Callable[[], None] = staticmethod(lambda: ended.append(True))

    monkeypatch.setattr(client, "hosts", lambda nodelist: ["n1", "n2"])
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}" if has_srun else None)
    monkeypatch.setattr(client, "begin_step", lambda words: begun.append(list(words)) or Step())
    config = Config("r", launch=LaunchConfig(command=("true",), **launch))  # type: ignore[arg-type]
    job = Job("7", nodes=2, ranks=2, restarts=0, nodelist="n[1-2]")
    place = JobNodes(config, RunDir(tmp_path), job, job)
    place.watch_supervisor()
    assert len(begun) == watched
    if watched:
        assert {"--nodelist=n2", "--overlap", "--mem=0", "--ntasks=1", "--mpi=none"} <= set(begun[0])
        place.job = job.on(["n1"])
        place.watch_supervisor()
        assert ended == [True] and len(begun) == 1, "no other node is left"


def test_a_file_server_that_fails_over_at_that_moment_is_waited_for(run, monkeypatch):
    """The node that was lost, or its switch, may have served files too; nobody else requeues the job."""
    server, done = FileServer(errno.ESTALE, "run.json", "open").install(monkeypatch), []

    def no_space(*about):
        raise RunFailed("no space left on device", "free some")

    monkeypatch.setattr(Attempts, "end", no_space)
    monkeypatch.setattr(standby, "load", lambda path: Config("r", launch=LaunchConfig(command=("true",))))
    monkeypatch.setattr(standby, "follow", lambda verdict, *about, parent: done.append(verdict.host) or 70)
    monkeypatch.setattr(client, "job_fields", lambda job: {})
    assert standby.main() == 70 and done == ["n1"] and server.failed == 1
