"""A run on Kubernetes by the commands: what kubectl is asked, with a kubectl that writes it down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.cli import main
from hpctrain.launch.engines.jobs import submissions
from hpctrain.launch.engines.kubernetes import entry
from hpctrain.run.folder import RunDir

KUBECTL = """#!/bin/sh
echo "$*" >> {folder}/asked
case "$1" in
create) cat > {folder}/given; [ ! -e {folder}/refuse ] || {{ echo 'admission webhook denied' >&2; exit 1; }} ;;
get) cat {folder}/answer ;;
logs) echo 'pod 0 says' ;;
esac
"""
RUN = """
name: digits
launch:
  engine: kubernetes
  command: [train]
  nodes: 2
  kubernetes: {image: train, namespace: team, volumes: {/runs: claim}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a run file and a kubectl."""
    (tmp_path / "kubectl").write_text(KUBECTL.format(folder=tmp_path))
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "answer").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(folder: Path, **status: Any) -> str:
    """What the cluster will say of the newest job; its name."""
    run = RunDir(folder / "runs" / "digits")
    job = submissions(run)[-1].job
    name = job.rpartition("/")[2].removesuffix(".trainjob")
    about = {"name": name, "annotations": {"hpctrain/run-folder": str(run.path)}}
    (folder / "answer").write_text(json.dumps({"metadata": about, "status": status}))
    return job


def test_the_key_goes_to_the_cluster_and_into_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml"]) == 0
    given = list(yaml.safe_load_all((folder / "given").read_text()))
    key = given[0]["stringData"]["key"]
    assert len(key) == 64 and [each["kind"] for each in given] == ["Secret", "Service", "Job"]
    run = folder / "runs" / "digits"
    written = [path for path in run.rglob("*") if path.is_file()]
    assert {run / "job.yaml", run / "run.yaml", run / "jobs.jsonl"} <= set(written)
    assert not any(key in path.read_text() for path in written)
    said = capsys.readouterr()
    assert key not in said.out + said.err + (folder / "asked").read_text()
    assert submissions(RunDir(run))[0].job == f"team/{given[2]['metadata']['name']}" in said.out


def test_a_live_job_is_followed_and_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml"]) == 0
    job = answer(folder, active=2, ready=2)
    assert main(["status", "run.yaml", "--json"]) == 0
    assert f'"job": "{job}", "job_state": "RUNNING"' in capsys.readouterr().out
    assert main(["submit", "run.yaml"]) == 64 and "is RUNNING already" in capsys.readouterr().err
    assert main(["logs", "run.yaml"]) == 0 and "pod 0 says" in capsys.readouterr().out
    assert main(["stop", "run.yaml"]) == 0
    assert f"cancelled job {job}, which hpctrain cannot save" in capsys.readouterr().out
    name = job.rpartition("/")[2]
    wanted = f"--namespace=team job/{name} service/{name} secret/{name}"
    assert (folder / "asked").read_text().splitlines()[-1].endswith(wanted)


def test_a_train_job_is_followed_and_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml", "--launch.kubernetes.kind", "TrainJob"]) == 0
    assert [each["kind"] for each in yaml.safe_load_all((folder / "given").read_text())][1:] == [
        "TrainingRuntime",
        "TrainJob",
    ]
    job = answer(folder, jobsStatus=[{"name": "node", "ready": 2}])
    name = job.removeprefix("team/").removesuffix(".trainjob")
    assert job == f"team/{name}.trainjob"
    assert main(["status", "run.yaml", "--json"]) == 0
    assert f'"job": "{job}", "job_state": "RUNNING"' in capsys.readouterr().out
    assert main(["logs", "run.yaml"]) == 0 and "pod 0 says" in capsys.readouterr().out
    assert main(["cancel", "run.yaml"]) == 0
    *_, logs, _, _, ended = (folder / "asked").read_text().splitlines()
    assert f"--selector=jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0" in logs
    group = "trainer.kubeflow.org"
    assert ended.endswith(f"--namespace=team trainjob.{group}/{name} trainingruntime.{group}/{name} secret/{name}")


def test_a_job_that_is_not_the_runs_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml"]) == 0
    answer(folder, ready=2)
    (folder / "answer").write_text(
        (folder / "answer").read_text().replace(str(folder / "runs" / "digits"), "/elsewhere")
    )
    assert main(["cancel", "run.yaml"]) == 0 and "is left alone" in capsys.readouterr().out
    assert "delete" not in (folder / "asked").read_text()


def test_what_the_cluster_refuses_is_told_and_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "refuse").touch()
    assert main(["submit", "run.yaml"]) == 70
    assert "kubectl create refused: admission webhook denied" in capsys.readouterr().err
    assert "delete" in (folder / "asked").read_text() and submissions(RunDir(folder / "runs" / "digits")) == []
    assert main(["status", "run.yaml"]) == 0 and "admission webhook denied" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--chain", "2"], ["--after", "7"], ["--exclude", "n1"], ["--array", "seed=1,2"]])
def test_options_that_are_slurms_are_refused_by_name(
    option: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "run.yaml", *option]) == 64
    assert f"jobs of Kubernetes take no {option[0]}" in capsys.readouterr().err


def test_pods_start_it_and_nobody_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "run.yaml"]) == 64 and "launch.engine is kubernetes: its jobs run it" in capsys.readouterr().err


def condition(kind: str, **other: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": kind, "status": "True", **other}]}}


@pytest.mark.parametrize(
    ("found", "state"),
    [
        ({}, "PENDING"),
        ({"status": {"active": 3}}, "PENDING"),
        ({"status": {"active": 3, "ready": 2}}, "RUNNING"),
        ({"status": {"ready": 2}, "metadata": {"deletionTimestamp": "now"}}, "COMPLETING"),
        ({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, "COMPLETED"),
        (
            {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}},
            "FAILED",
        ),
        ({"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}}, "TIMEOUT"),
        ({"status": {"conditions": [{"type": "Failed", "status": "False"}], "ready": 1}}, "RUNNING"),
    ],
)
def test_states_in_slurms_words(found: dict[str, Any], state: str) -> None:
    assert entry("digits", found).state == state


def test_all_runs_are_asked_about_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = []
    for name in ("one", "two", "forgotten"):
        (folder / "answer").write_text("")
        assert main(["submit", "run.yaml", "--name", name]) == 0
        job = submissions(RunDir(folder / "runs" / name))[-1].job
        items.append({"metadata": {"name": job.rpartition("/")[2]}, "status": {"ready": len(items)}})
    (folder / "answer").write_text(json.dumps({"kind": "List", "items": items[:2]}))
    (folder / "asked").unlink()
    capsys.readouterr()
    assert main(["status", "--json"]) == 0
    found = {Path(each["run"]).name: each["job_state"] for each in json.loads(capsys.readouterr().out)}
    assert found == {"one": "PENDING", "two": "RUNNING", "forgotten": "UNKNOWN"}
    (asked,) = (folder / "asked").read_text().splitlines()
    assert asked.startswith("get job ") and asked.count("--namespace=team") == 1
