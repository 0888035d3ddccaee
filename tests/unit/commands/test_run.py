"""What ``hpctrain run`` makes of a program without a run file, and where it and a sweep start ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.commands.run import name_of
from hpctrain.config.sections import NAME, Config
from hpctrain.launch.engines import hosts, local
from hpctrain.run.verdict import Action, RunVerdict


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("python train.py --lr 1e-3", "train"),
        ("/usr/bin/python3.11 -u jobs/my train.py", "train"),
        ("python -m package.training --epochs 3", "training"),
        ("python -m package.training.__main__", "training"),
        ("./solve --n 3", "solve"),
        ("python", "python"),
        ("../...", "program"),
    ],
)
def test_a_program_names_its_run(program, name):
    assert name_of(program.split()) == name
    assert NAME.fullmatch(name)


@pytest.mark.parametrize(
    ("words", "name"), [(["-n", "2"], "train"), (["-n", "2", "--name", "mine"], "mine"), (["--name=mine"], "mine")]
)
def test_a_program_is_run_without_a_name(words, name, monkeypatch, tmp_path, cli):
    monkeypatch.chdir(tmp_path)
    started: list[Config] = []

    def run(asked):
        started.append(asked.config)
        return RunVerdict(Action.DONE, 0, "")

    monkeypatch.setattr(local, "run", run)
    cli("run", *words, "--", "python", "train.py")
    assert [(config.name, config.launch.command) for config in started] == [(name, ("python", "train.py"))]


@pytest.mark.parametrize(
    ("words", "runs"), [(["run"], 1), (["sweep", "--seed", "1,2"], 2)], ids=["a run", "each run of a sweep"]
)
def test_ranks_start_on_the_hosts_of_the_run_file(words, runs, monkeypatch, tmp_path, cli):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        "name: r\ntask: m:f\ntrain: {steps: 1, global_batch: 8}\nlaunch: {hosts: [a, b], ranks_per_node: 2}\n"
    )
    asked: list[int | None] = []

    def run(request):
        asked.append(request.ranks)
        return RunVerdict(Action.DONE, 0, "")

    monkeypatch.setattr(hosts, "run", run)
    command, *rest = words
    cli(command, "run.yaml", *rest)
    cli(command, "run.yaml", "-n", "4", *rest)
    assert asked == [None] * runs + [4] * runs
    cli(command, "run.yaml", "-n", "-2", *rest, code=64)
    assert len(asked) == 2 * runs


@pytest.mark.parametrize(
    ("nodes", "variables", "words", "ranks"),
    [
        (1, {"SLURMD_NODENAME": "n1", "SLURM_NTASKS": "4"}, [], 4),
        (1, {"SLURMD_NODENAME": "n1", "SLURM_NTASKS": "1"}, ["-n", "4"], 4),
        (2, {"SLURMD_NODENAME": "n1", "SLURM_NTASKS": "2"}, [], None),
        (1, {"SLURM_NTASKS": "1"}, [], None),  # salloc leaves the shell on the login node
    ],
)
def test_an_allocation_is_used_or_refused_in_one_sentence(
    nodes,
    variables,
    words,
    ranks,
    monkeypatch,
    tmp_path,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": str(nodes), **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    asked: list[int | None] = []

    def run(request):
        asked.append(request.ranks)
        return RunVerdict(Action.DONE, 0, "")

    monkeypatch.setattr(local, "run", run)
    assert main(["run", *words, "--", "true"]) == (64 if ranks is None else 0)
    assert asked == ([] if ranks is None else [ranks])
    if ranks is None:
        said = capsys.readouterr().err
        assert "hpctrain run uses only this machine, and job 7 has n[1-2]" in said and "hpctrain supervise" in said


def test_a_run_folder_in_place_of_a_run_file_leads_to_its_file(tmp_path, cli):
    (tmp_path / "run.yaml").write_text("name: r")
    said = cli("run", tmp_path, code=64).err
    assert f"is a run folder, and run takes a run file\n  fix: write {tmp_path}/run.yaml --run_dir {tmp_path}" in said
