"""Control groups of both versions, as Linux lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.system import cgroups

UNIFIED = "0::/job/step\n"
SPLIT = "9:memory:/job\n4:cpu,cpuacct:/job\n0::/\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path / "proc"


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        (UNIFIED, "job/step/memory.events", "low 0\noom 2\noom_kill 3\noom_group_kill 7\n"),
        (SPLIT, "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
)
def test_kills_for_memory_are_counted(tmp_path, proc, groups, file, text):
    put(proc / "self" / "cgroup", groups)
    assert cgroups.oom_kills(proc, tmp_path / "fs") is None
    put(tmp_path / "fs" / file, text)
    assert cgroups.oom_kills(proc, tmp_path / "fs") == 3


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        (UNIFIED, "job/step/cpu.stat", "usage_usec 9\nnr_throttled 4\nthrottled_usec 2500000\n"),
        (SPLIT, "cpu,cpuacct/job/cpu.stat", "nr_periods 9\nnr_throttled 4\nthrottled_time 2500000000\n"),
        (SPLIT, "cpu/job/cpu.stat", "nr_periods 9\nnr_throttled 4\nthrottled_time 2500000000\n"),
    ],
)
def test_time_under_the_quota_is_in_seconds(tmp_path, proc, groups, file, text):
    put(proc / "self" / "cgroup", groups)
    assert cgroups.throttled_s(proc, tmp_path / "fs") is None
    put(tmp_path / "fs" / file, text)
    assert cgroups.throttled_s(proc, tmp_path / "fs") == 2.5


def test_without_control_groups_nothing_is_said(tmp_path):
    assert cgroups.oom_kills(tmp_path, tmp_path) is None
    assert cgroups.throttled_s(tmp_path, tmp_path) is None
    assert cgroups.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_a_containers_quota_counts(tmp_path, files, cores):
    for name, text in files.items():
        put(tmp_path / name, text)
    assert cgroups.cpu_quota(tmp_path) == cores


def test_the_strictest_limit_above_a_group_counts_and_cached_files_do_not(tmp_path, proc):
    root = tmp_path / "fs"
    put(proc / "self" / "cgroup", UNIFIED)
    assert cgroups.memory_left(proc, root) is None
    put(root / "job/step/memory.max", "max\n")
    put(root / "job/step/memory.stat", "anon 100\nfile 700\nshmem 30\n")
    assert cgroups.memory_left(proc, root) is None
    put(root / "job/memory.max", "1000\n")
    put(root / "job/memory.stat", "anon 300\nfile 600\nshmem 50\n")
    assert cgroups.memory_left(proc, root) == 650
    put(root / "memory.max", "900\n")
    put(root / "memory.stat", "anon 800\nfile 0\nshmem 50\n")
    assert cgroups.memory_left(proc, root) == 50


def test_limits_of_version_1_are_read_with_those_of_groups_inside(tmp_path, proc):
    root = tmp_path / "fs"
    put(proc / "self" / "cgroup", SPLIT)
    put(root / "memory/job/memory.limit_in_bytes", "1000\n")
    put(root / "memory/job/memory.stat", "rss 1\ntotal_rss 300\ntotal_cache 500\n")
    assert cgroups.memory_left(proc, root) == 700
