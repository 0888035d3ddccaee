"""A store of objects for the tests of tables and of checkpoints, and what a run sets in its environment."""

import os
from collections.abc import Iterator

import pytest

from hpctrain.system.output import quiet_environment
from tests.support.object_store import ObjectStore, serving


def pytest_configure() -> None:
    """Two processes compute at a time: with a thread for each core they would wait for each other's."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def _server() -> Iterator[ObjectStore]:
    pytest.importorskip("moto", reason="the extra dev is not installed")
    with serving() as store:
        yield store


@pytest.fixture
def object_store(_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """An S3 server that this test's environment leads to."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in _server.environment.items():
        monkeypatch.setenv(name, value)
    _server.fail("", 0)
    return _server


@pytest.fixture
def environment_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run sets, for the test only."""
    for name, value in quiet_environment(False, {}).items():
        monkeypatch.setenv(name, value)
