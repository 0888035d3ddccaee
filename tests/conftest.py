"""Hooks and fixtures for all tests: which tests may be skipped, and checks that none leaves anything behind."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.support import mpi

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

NOT_PERMITTED = "not permitted here: "
"""Prefix of a skip reason that CI accepts."""
_AT_THE_TOP = re.compile(r'(?m)^(import \S*|from \S*( import .*)?|\w.*importorskip\(")(torch|tensorflow|keras)')
"""Imports of a framework, or of a module of hpctrain or the tests named after the framework that it imports."""
_OF_LIBRARIES = ("PYTEST_", "TF2_", "KERAS_", "KMP_", "TF_", "TORCH", "MPLBACKEND", "COLUMNS", "LINES", "SOCKET_OF")
"""Prefixes of environment variables that pytest, the frameworks when imported, and tests/support/warm_ranks.py set."""
SLURM = "tests/slurm/"
LONG = "sweep engines readme gpu_proof killed_plans tensorflow_training recipes torch_fully_sharded tutorial ports"
FIRST = (SLURM, *(f"tests/dist/test_{name}.py" for name in LONG.split()))
"""Files that take minutes begin first, or one of them would run alone in the end. Slurm's count as one."""


def pytest_configure() -> None:
    """Install a SIGINT handler: background jobs of a shell ignore SIGINT, and children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose tools this machine lacks."""
    lacks = {
        "world_size": ("mpirun", lambda: mpi.find_mpirun() is None),
        "slurm": ("slurmctld", lambda: shutil.which("slurmctld", path=_with_sbin()) is None),
        "gpu": ("a GPU", lambda: not Path("/dev/nvidia0").exists()),
    }
    for marker, (tool, is_missing) in lacks.items():
        if item.get_closest_marker(marker) and is_missing():
            pytest.skip(f"this machine lacks {tool}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``make check``, do not collect files that import a framework: each worker would spend seconds on that."""
    return True if _for_check(config) and _imports_a_framework(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests whose file imports a framework as slow."""
    for item in items:
        if _imports_a_framework(item.path):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """With ``--dist loadfile``, keep the tests of a file together, and those of Slurm, and begin with the longest."""
    return LongestFirst(config, log) if config.getvalue("dist") == "loadfile" else None


class LongestFirst(LoadFileScheduling):
    """Assigns whole files to workers, and all tests of Slurm, which mostly wait for its daemons, to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return SLURM if file.startswith(SLURM) else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        if first := next((scope for scope in FIRST if scope in self.workqueue), None):
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With HPCTRAIN_CI=1, turn the skip of a test into a failure: CI must not leave tests out."""
    report = yield
    if not item.get_closest_marker("gpu"):
        _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for whole files that skip themselves (importorskip)."""
    report = yield
    if "gpu" not in collector.nodeid.split("/"):
        _refuse_skip(report)
    return report


@pytest.fixture
def mpirun() -> Callable[..., mpi.Result]:
    """`mpirun(n, Path(program) | "module", *args, env=, cwd=, timeout=, check=)`; see tests/support/mpi.py."""
    return mpi.mpirun


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread running or the environment changed, and restore the environment.

    With ``make check``, also fail one that imports a framework: that is slow.
    """
    environment, threads, modules = dict(os.environ), set(threading.enumerate()), set(sys.modules)
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
    left = _still_running(threads, mpi.PATIENCE_S)
    assert not left, f"the test left threads running: {', '.join(thread.name for thread in left)}"
    frameworks = {"torch", "tensorflow"} & (sys.modules.keys() - modules)
    assert not frameworks or not _for_check(request.config), f"a test that imports {frameworks} has to be marked slow"


def _for_check(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


@functools.cache
def _imports_a_framework(path: Path) -> bool:
    return path.suffix == ".py" and _AT_THE_TOP.search(path.read_text(encoding="utf-8")) is not None


def _still_running(before: set[threading.Thread], patience_s: float) -> list[threading.Thread]:
    deadline = time.monotonic() + patience_s
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in new if thread.is_alive()]


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure in CI, unless the kernel or a container forbids what the test does."""
    if os.environ.get("HPCTRAIN_CI") != "1" or not report.skipped or hasattr(report, "wasxfail"):
        return
    if NOT_PERMITTED not in str(report.longrepr):
        report.outcome, report.longrepr = "failed", f"skipped where nothing may be: {report.longrepr}"


def _with_sbin() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
