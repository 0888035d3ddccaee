"""Evidence from the host and stacks from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.monitor.node import host, stacks
from hpctrain.monitor.node.gpu_readings import GpuReading


def reading(time: float, counters: dict[str, float], process: dict[str, float] | None = None) -> host.Reading:
    return host.Reading(time, counters, {7: process or {}})


def test_quiet_counters_say_nothing():
    counters = {"cpu_s": 10.0, "steal_s": 0.0, "throttled_s": 1.0, "swapped_pages": 5.0}
    found = host.compare(
        reading(0, counters, {"waiting_s": 1.0}), reading(5, {**counters, "cpu_s": 20}, {"waiting_s": 1.1})
    )
    assert found.host == ()
    assert found.by_pid == {}


@pytest.mark.parametrize(
    ("grown", "word"),
    [
        ({"throttled_s": 2.0}, "quota throttled it for 40%"),
        ({"steal_s": 2.0, "cpu_s": 10.0}, "hypervisor took 20%"),
        ({"hot": 3.0}, "3 times for heat"),
        ({"swapped_pages": 5000.0}, "swaps 1000 pages/s"),
        ({"memory_pressure_s": 1.0}, "20% of the time for memory"),
        ({"io_pressure_s": 4.0}, "80% of the time for storage"),
        ({"retransmits": 1000.0}, "200 segments/s"),
    ],
)
def test_what_stands_out_is_said(grown, word):
    found = host.compare(reading(0, dict.fromkeys(grown, 0.0)), reading(5, grown))
    assert word in found.host[0]


def test_waiting_for_a_processor_is_the_processs_own():
    found = host.compare(
        reading(0, {}, {"waiting_s": 0.0, "involuntary": 0}), reading(5, {}, {"waiting_s": 2.5, "involuntary": 50})
    )
    assert found.by_pid[7] == ("waited 50% of the time for a processor, 10 involuntary switches/s",)
    assert found.starved == {7}


def test_a_real_reading_has_the_counters_of_linux():
    taken = host.read([os.getpid()], 0.0)
    assert taken.host["cpu_s"] > 0
    assert {"waiting_s", "involuntary", "major_faults"} <= taken.processes[os.getpid()].keys()
    assert host.read([2**22 + 1], 0.0).processes == {2**22 + 1: {}}


def test_energy_is_the_growth_of_the_counters_that_there_are():
    def at(cpu, *gpus):
        counters = {} if cpu is None else {"cpu_joules": cpu}
        return host.Reading(
            0.0, counters, {}, [GpuReading(index, 0, joules=joules) for index, joules in enumerate(gpus)]
        )

    assert host.energy(at(1.0, 10.0, 20.0), at(4.0, 12.0, 25.0)) == {"cpu": 3.0, "gpu": 7.0}
    assert host.energy(at(9.0, 10.0, None), at(1.0, 12.0, 25.0)) == {"cpu": 0.0, "gpu": 2.0}
    assert host.energy(at(None), at(5.0, None)) == {}


def test_energy_of_processors_is_read_by_package(tmp_path, monkeypatch):
    for name, joules in (("intel-rapl:0", 2), ("intel-rapl:0:0", 1), ("intel-rapl:1", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{joules}000000\n")
    monkeypatch.setattr(host, "POWER", tmp_path)
    assert host.cpu_energy() == {"cpu_joules": 5.0}
    monkeypatch.setattr(host, "POWER", tmp_path / "none")
    assert host.cpu_energy() == {}


def test_a_process_that_ends_while_it_is_read_costs_its_counters_only(monkeypatch):
    def gone(folder):
        raise ProcessLookupError

    monkeypatch.setattr(os, "listdir", gone)
    assert host.process_counters(os.getpid())["waiting_s"] == 0


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[str]]:
    program = (
        "import faulthandler, signal, sys\n"
        "file = open(sys.argv[1], 'wb')\n"
        "faulthandler.register(signal.SIGUSR2, file=file)\n"
        "def endless():\n    print('ready', flush=True)\n    while True: pass\n"
        "endless()"
    )
    with tempfile.NamedTemporaryFile() as file:
        child = subprocess.Popen([sys.executable, "-c", program, file.name], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.dump_file = Path(file.name)  # type: ignore[attr-defined]
        yield child
        child.kill()
        child.wait()
        child.stdout.close()


def test_stacks_of_a_stopped_process_are_read_from_outside(spinning):
    os.kill(spinning.pid, signal.SIGSTOP)
    assert "endless" in stacks.dump(spinning.pid, 0, Path("/nowhere"))


def test_without_py_spy_the_process_is_asked(spinning, monkeypatch):
    monkeypatch.setattr(stacks, "with_py_spy", lambda pid: (None, "py-spy may not read the process: not permitted"))
    file: Path = spinning.dump_file  # type: ignore[attr-defined]
    assert "in endless" in stacks.dump(spinning.pid, signal.SIGUSR2, file)
    os.kill(spinning.pid, signal.SIGSTOP)
    text = stacks.dump(spinning.pid, signal.SIGUSR2, file)
    assert text == (
        "no stack: py-spy may not read the process: not permitted; "
        "the process does not run, so its faulthandler cannot answer\n"
    )


def test_rivals_for_a_processor_are_named(spinning):
    os.sched_setaffinity(spinning.pid, {0})
    lines = host.rivals({0}, set(), 1.0, {spinning.pid: 0.0}, {spinning.pid: 0.9})
    assert lines and lines[0].startswith(f"process {spinning.pid} (python")
    assert host.rivals({0}, {spinning.pid}, 1.0, {spinning.pid: 0.0}, {spinning.pid: 0.9}) == []
    assert host.rivals(set(), set(), 1.0, {spinning.pid: 0.0}, {spinning.pid: 0.9}) == []


def test_a_rank_of_this_run_that_another_agent_watches_is_not_a_rival(monkeypatch):
    """Hosts in network namespaces, containers of one machine: its environment names the run."""
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", "/runs/one")
    with subprocess.Popen([sys.executable, "-c", "input(1)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.read(1)  # it runs: its environment can be read
        cpus, used = os.sched_getaffinity(other.pid), ({other.pid: 0.0}, {other.pid: 0.9})
        of_this_run = host.rivals(cpus, set(), 1.0, *used)
        monkeypatch.setenv("HPCTRAIN_RUN_DIR", "/runs/other")
        of_another = host.rivals(cpus, set(), 1.0, *used)
        other.communicate(b"\n")
    assert of_this_run == [] and len(of_another) == 1
