"""What holds for every test: which may be left out, and what none may leave behind."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import mpi

_OF_LIBRARIES = ("PYTEST_", "TF2_", "KERAS_", "KMP_", "TF_", "TORCH", "MPLBACKEND", "COLUMNS", "LINES")
"""Environment variables that the frameworks and pytest set when they are imported."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what this machine lacks the tools for."""
    lacks = {
        "world_size": ("mpirun", lambda: mpi.find_mpirun() is None),
        "slurm": ("slurmctld", lambda: shutil.which("slurmctld", path=_with_sbin()) is None),
        "gpu": ("a GPU", lambda: not Path("/dev/nvidia0").exists()),
    }
    for marker, (tool, is_missing) in lacks.items():
        if item.get_closest_marker(marker) and is_missing():
            pytest.skip(f"this machine has no {tool}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With HPCTRAIN_CI=1 a skipped test is a failed one: a gate that silently leaves tests out is none."""
    report = yield
    excused = item.get_closest_marker("gpu") or hasattr(report, "wasxfail")
    if report.skipped and _in_ci() and not excused:
        report.outcome, report.longrepr = "failed", f"skipped where nothing may be: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for whole files that leave themselves out (importorskip)."""
    report = yield
    if report.skipped and _in_ci() and "gpu" not in collector.nodeid.split("/"):
        report.outcome, report.longrepr = "failed", f"skipped where nothing may be: {report.longrepr}"
    return report


@pytest.fixture
def mpirun() -> Callable[..., mpi.Result]:
    """`mpirun(n, Path(program) | "module", *args, env=, cwd=, timeout=, check=)`; see tests/support/mpi.py."""
    return mpi.mpirun


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """A test that leaves a thread running or the environment changed fails, and does not spoil the next one."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    changed = sorted(
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and not name.startswith(_OF_LIBRARIES)
    )
    for name in changed:
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    assert not changed, f"the test changed environment variables: {', '.join(changed)}"
    left = _still_running(threads, patience_s=5.0)
    assert not left, f"the test left threads running: {', '.join(thread.name for thread in left)}"


def _still_running(before: set[threading.Thread], patience_s: float) -> list[threading.Thread]:
    deadline = time.monotonic() + patience_s
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in new if thread.is_alive()]


def _in_ci() -> bool:
    return os.environ.get("HPCTRAIN_CI") == "1"


def _with_sbin() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
