"""The doctor: what it makes of what it finds."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hpctrain.commands import doctor
from hpctrain.commands.doctor import show
from hpctrain.doctor import check, machine, mpi_ranks, slurm, software
from hpctrain.doctor.check import Check, Probe, Status, note, problem
from hpctrain.launch.mpi_library import ProgramResult
from tests.support.programs import on_path

ONE_MAP = "7f00-7f01 r-xp 00000000 08:01 1 /opt/mpi/lib/libmpi.so.40.40\n"
OTHER_MAP = "7f02-7f03 r-xp 00000000 08:01 2 /usr/lib/libmpi.so.12\n"


def test_findings_are_a_table_with_fixes_below_what_is_wrong(capsys):
    found = [Check("Python", "3.11"), note("GPUs", "none"), problem("MPI", "broken", "mend it")]
    assert show(found, as_json=False) == 64
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok      Python  3.11"
    assert lines[2:4] == ["problem MPI     broken", " " * 14 + "  fix: mend it"]
    assert lines[-1] == "1 problem"


def test_findings_are_json(capsys):
    assert show([Check("Python", "3.11")], as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"ok": True, "findings": [{"topic": "Python", "value": "3.11", "status": "ok", "fix": ""}]}


@pytest.mark.parametrize(
    ("built", "seen", "status", "part"),
    [
        ("2.0", Probe({"mpi": True, "nccl": 0, "maps": ONE_MAP}), Status.OK, "same MPI library"),
        ("2.0", Probe({"mpi": True, "nccl": 22907, "maps": ONE_MAP}), Status.OK, "NCCL 22907"),
        ("2.0+cu130", Probe({"mpi": True, "nccl": 22907, "maps": ONE_MAP}), Status.OK, "NCCL 22907"),
        ("1.0", Probe({"mpi": True, "nccl": 0, "maps": ONE_MAP}), Status.NOTE, "built against torch 1.0"),
        ("2.0", Probe({"mpi": True, "nccl": 0, "maps": ONE_MAP + OTHER_MAP}), Status.PROBLEM, "not mpi4py's"),
        ("2.0", Probe({"mpi": False, "nccl": 0, "maps": ONE_MAP}), Status.PROBLEM, "without MPI"),
        ("1.0", Probe({}, "undefined symbol: x"), Status.PROBLEM, "built against torch 1.0, 2.0 is installed"),
    ],
)
def test_horovod_is_held_against_what_is_installed(monkeypatch, built, seen, status, part):
    monkeypatch.setattr(software, "version_of", lambda *packages: "2.0")
    found = software.horovod_for("torch", built, seen)
    assert found.status is status
    assert part in found.value
    assert (found.fix != "") == (status is not Status.OK)


@pytest.mark.parametrize(("nccl", "fix"), [(0, "install-horovod --force"), (22907, "install-horovod --gpu --force")])
def test_a_build_for_gpus_is_renewed_as_one(nccl, fix):
    found = software.horovod_for("torch", "1.0", Probe({"mpi": True, "nccl": nccl, "maps": ONE_MAP}))
    assert found.fix.endswith(fix)


@pytest.mark.parametrize(("for_gpus", "status"), [(False, Status.NOTE), (True, Status.OK)])
def test_horovod_for_cpus_is_noted_where_torch_trains_on_a_gpu(monkeypatch, for_gpus, status):
    monkeypatch.setattr(software, "version_of", lambda *packages: "2.0")
    facts = {"mpi": True, "nccl": 0, "for_gpus": for_gpus, "trains_on_gpu": True, "maps": ONE_MAP}
    found = software.horovod_for("torch", "2.0", Probe(facts))
    assert found.status is status
    if status is Status.NOTE:
        assert "NCCL of PyTorch" in found.value
        assert found.fix == "run: hpctrain install-horovod --gpu --force, if you want reduce.kind: horovod"


@pytest.mark.parametrize("for_gpus", [False, True])
def test_no_fix_for_tensorflow_puts_a_build_for_cpus_in_the_place_of_one_for_gpus(monkeypatch, for_gpus):
    facts = {"mpi": True, "nccl": 0, "for_gpus": for_gpus, "maps": ONE_MAP}
    monkeypatch.setattr(software, "is_installed", lambda package: True)
    monkeypatch.setattr(software, "built_for", lambda: {"torch": "2.0"})
    monkeypatch.setattr(software.importlib.metadata, "version", lambda package: "2.0")
    monkeypatch.setattr(check, "probe", lambda code: Probe(facts))
    found = {finding.topic: finding for finding in software.horovod()}["Horovod tensorflow"]
    assert (found.status, found.fix != "") == ((Status.OK, False) if for_gpus else (Status.NOTE, True))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_horovod_tells_what_it_was_built_for(framework):
    facts = check.probe(check.HOROVOD.format(framework=framework)).facts
    assert isinstance(facts["for_gpus"], bool)
    assert facts["trains_on_gpu"] in (False, framework == "torch")


def test_a_probe_that_dies_is_no_end_of_the_doctor():
    assert check.probe("facts['x'] = 1").facts == {"x": 1}
    assert check.probe("raise ImportError('libfoo.so not found')").error == "ImportError: libfoo.so not found"
    assert check.probe("import os; os.abort()").error == "ended with code -6"


def test_a_framework_that_is_not_there_is_a_note_with_the_command_to_install_it():
    found = software._framework("Foo", "no_such_framework", "", "pip install foo")
    assert (found.status, found.fix) == (Status.NOTE, "pip install foo")


def test_a_file_system_is_tried(tmp_path):
    found = list(machine.file_system(tmp_path))
    assert [finding.topic for finding in found] == ["run folder", "locking"]
    assert str(tmp_path) in found[0].value
    assert list(tmp_path.iterdir()) == [], "nothing is left there"


def test_a_folder_that_does_not_exist_yet_stands_for_its_parent(tmp_path):
    assert machine.existing(tmp_path / "runs" / "a") == tmp_path


def test_little_room_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    (found,) = machine.shared_memory(tmp_path)
    assert (found.status, "shm-size" in found.fix) == (Status.PROBLEM, True)
    assert next(machine.file_system(tmp_path)).status is Status.PROBLEM


def test_a_broken_driver_is_a_problem(tmp_path, monkeypatch):
    on_path(tmp_path, monkeypatch, **{"nvidia-smi": "echo 'Failed to initialize NVML'; exit 9"})
    (found,) = machine.gpus()
    assert found.status is Status.PROBLEM
    assert "NVML" in found.value
    on_path(tmp_path, monkeypatch, **{"nvidia-smi": "echo 'NVIDIA H100, 80 GiB, 570'"})
    (found,) = machine.gpus()
    assert (found.status, found.value) == (Status.OK, "NVIDIA H100, 80 GiB, 570")


OPEN_MPI_SUMMARY = """Connection summary: (pml)
  on-host:  all connections are sm
  off-host: all connections are tcp
"""
FAST = {
    "latency_us": 0.7,
    "bandwidth_gb_s": 15.0,
    "allreduce_4mb_ms": 0.6,
    "nodes": 1,
    "threads": True,
    "cores": [2, 2],
}


def test_transports_are_read_from_what_open_mpi_says():
    assert mpi_ranks.transport(OPEN_MPI_SUMMARY, "x") == "sm within a node, tcp between nodes"
    assert mpi_ranks.transport("", "MPICH 5") == "not known from MPICH 5"


def test_measurements_are_judged():
    assert {finding.status for finding in mpi_ranks.judge(FAST, "sm within a node")} == {Status.OK}
    facts = {**FAST, "latency_us": 500.0, "threads": False}
    slow = {finding.topic: finding.status for finding in mpi_ranks.judge(facts, "x")}
    assert (slow["latency"], slow["MPI threads"]) == (Status.NOTE, Status.PROBLEM)
    assert next(mpi_ranks.judge(FAST, "tcp within a node")).status is Status.PROBLEM


SLURM_CONFIG = """Configuration data as of 2026-11-21T02:00:00
AccountingStorageType   = accounting_storage/none
ClusterName             = mini
JobRequeue              = 0
PreemptType             = preempt/partition_prio
PreemptParameters       = (null)
SLURM_VERSION           = 22.05.8
"""


def test_slurms_settings_are_judged():
    found = {finding.topic: finding for finding in slurm.site(slurm.settings(SLURM_CONFIG))}
    assert found["Slurm"].value == "22.05.8, cluster mini"
    notes = {topic for topic, finding in found.items() if finding.status is Status.NOTE}
    assert notes == {"requeue", "accounting", "preemption"}


def test_a_run_file_is_read_and_its_task_looked_for(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: a\ntask: no_such.module:f\ntrain: {steps: 1, global_batch: 1}\n")
    config, found = software.of_run_file(str(path))
    assert config is not None
    assert [finding.status for finding in found] == [Status.OK, Status.PROBLEM]
    path.write_text("nmae: a\n")
    config, found = software.of_run_file(str(path))
    assert config is None
    assert "nmae" in found[0].value


BARE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "tensorflow", "keras", "mpi4py", "horovod"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def test_the_doctor_works_where_nothing_is_installed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    words = [sys.executable, "-m", "hpctrain", "doctor", "--json"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    found = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    for topic in ("MPI", "PyTorch", "TensorFlow", "Horovod"):
        assert found[topic]["status"] == "note", found[topic]
        assert found[topic]["fix"]
    assert found["HDF5"]["status"] == "ok"


@pytest.mark.parametrize(
    ("code", "said", "status", "value"),
    [
        (0, "", Status.OK, "they come as far as their first step"),
        (64, "noise\nhpctrain: nccl needs GPUs\n  fix: set reduce.kind: mpi\n", Status.PROBLEM, "nccl needs GPUs"),
        (139, "Segmentation fault\n", Status.PROBLEM, "they ended early"),
    ],
)
def test_ranks_are_started_with_the_options_of_the_run_file(monkeypatch, code, said, status, value):
    words = []

    def started(given, ranks):
        words.extend([ranks, *given])
        return ProgramResult(code, "", said)

    monkeypatch.setattr("hpctrain.doctor.mpi_ranks.started", started)
    found = doctor.trial_on_ranks(2, ["run.yaml", "--data.workers", "1"])
    assert words == [2, "hpctrain", "train", "run.yaml", "--data.workers", "1", "--trial"]
    assert (found.topic, found.status) == ("2 ranks", status)
    assert value in found.value
    assert "nccl" not in value or found.fix == "set reduce.kind: mpi"
