"""Fixtures: an object store for tests of tables and checkpoints, the command line, and the environment of a run."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpctrain.cli import main
from hpctrain.system.output import quiet_environment
from tests.support.object_store import ObjectStore, serving


def pytest_configure() -> None:
    """Use one OpenMP thread: two test processes with a thread per core would slow each other down."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def _server() -> Iterator[ObjectStore]:
    pytest.importorskip("moto", reason="the extra dev is not installed")
    with serving() as store:
        yield store


@pytest.fixture
def object_store(_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A running S3 server, with the test's environment set up for it."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in _server.environment.items():
        monkeypatch.setenv(name, value)
    _server.fail("", 0)
    return _server


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``cli(*words, code=0)`` runs ``hpctrain`` in this process; ``out`` and ``err`` of the result are what it said."""

    def run(*words: object, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def environment_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment variables that a run sets, for the test only."""
    for name, value in quiet_environment(False, {}).items():
        monkeypatch.setenv(name, value)
