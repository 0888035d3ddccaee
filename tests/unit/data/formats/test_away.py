"""Which errors of a store pass, and how long readers wait for it."""

import errno
import math
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data.formats import away
from hpctrain.data.formats.away import noticing, retry_items, retry_store
from hpctrain.data.formats.sources import open_dataset
from hpctrain.errors import StoreDown, UserError
from tests.support.faults import FileServer, one_by_one


class LibraryError(Exception):
    """Of a table library: no class says what kind of error it is."""


PASSING = [
    OSError("When reading information for key 'x': AWS Error NETWORK_CONNECTION"),
    LibraryError("ServerError: HTTP 503: try again"),
    LibraryError("HTTPConnectionPool(host='h', port=1): Max retries exceeded (Connection refused)"),
    LibraryError("Generic S3 error: Error performing GET http://h/x in 12s, after 10 retries - error sending request"),
    LibraryError("Kernel error: Json error: EOF while parsing a value at line 1 column 7"),
    EOFError("the store gave 10 bytes in place of 20"),
]
LASTING = [
    LibraryError("NoSuchTableError: Table does not exist: ns.rows"),
    LibraryError("Access Denied: 403"),
    OSError("AWS Error ACCESS_DENIED during HeadObject operation"),
    FileNotFoundError("bucket/x"),
    ValueError("version 12 of the table"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_faults_that_pass(error):
    with pytest.raises(StoreDown, match="s3://b/x does not answer"), noticing("s3://b/x", remote=True):
        raise error


@pytest.mark.parametrize("error", LASTING, ids=str)
def test_faults_that_do_not_pass_propagate(error):
    with pytest.raises(type(error)), noticing("s3://b/x", remote=True):
        raise error


def test_a_file_server_may_be_away_too():
    with pytest.raises(StoreDown), noticing("/scratch/x", remote=False):
        raise OSError(errno.ESTALE, "Stale file handle")
    with pytest.raises(OSError, match="Permission"), noticing("/scratch/x", remote=False):
        raise OSError(errno.EACCES, "Permission denied")


class Away:
    """An HDF5 array whose server does not answer once."""

    def __init__(self, array: h5py.Dataset) -> None:
        self.array, self.shape, self.chunks, self.reads = array, array.shape, array.chunks, 0

    def __getitem__(self, rows: slice) -> Any:
        self.reads += 1
        if self.reads == 1:
            raise OSError(errno.EIO, "Can't read data")
        return self.array[rows]


def test_a_file_server_that_is_away_for_a_moment_costs_a_run_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(away, "PAUSES_S", (0.001,))
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    lines = open_dataset(tmp_path / "a.jsonl")
    server = FileServer(errno.ESTALE, "a.jsonl", "pread").install(monkeypatch)
    assert lines.read(np.arange(2))["x"].tolist() == [1, 2] and server.failed == 1
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=[1, 2], chunks=(1,))
    server_of_h5 = FileServer(errno.EIO, "a.h5", "open").install(monkeypatch)
    blocks: Any = open_dataset(tmp_path / "a.h5")
    assert server_of_h5.failed == 1
    reader = blocks.readers["x"]
    reader.dataset = Away(reader.dataset)
    assert blocks.read(np.arange(2))["x"].tolist() == [1, 2] and reader.dataset.reads == 2
    server.left = math.inf
    with pytest.raises(StoreDown, match=r"a\.jsonl does not answer: .*Stale"):
        lines.read(np.arange(2))


def test_a_file_server_may_fail_while_files_are_looked_for(tmp_path, monkeypatch):
    """No file may be left out, and none be taken for one of another kind."""
    monkeypatch.setattr(away, "PAUSES_S", (0.0,))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        with h5py.File(tmp_path / folder / "x.h5", "w") as file:
            file["x"] = [1, 2]
    for _ in one_by_one(monkeypatch, str(tmp_path)):
        assert len(open_dataset(f"{tmp_path}/*/x.h5")) == 4


def test_expired_credentials_are_named():
    with pytest.raises(UserError, match="the credentials for s3://b/x have expired"), noticing("s3://b/x", remote=True):
        raise OSError("AWS Error UNKNOWN (HTTP status 400): ExpiredToken: The provided token has expired.")


def test_the_store_is_asked_again_for_longer_than_a_minute(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)

    def never():
        raise StoreDown("it does not answer", "wait")

    with pytest.raises(StoreDown):
        retry_store(never)
    assert tuple(waited) == away.PAUSES_S
    assert sum(waited) > 60


def test_rows_that_came_are_not_read_twice(monkeypatch):
    monkeypatch.setattr(away, "PAUSES_S", (0.0,))
    begun = []

    def rows():
        begun.append(len(begun))
        for row in range(4):
            if row == len(begun):  # each call gives one more; the wait starts over with each row that came
                raise StoreDown("it does not answer", "wait")
            yield row

    assert list(retry_items(rows)) == [0, 1, 2, 3]
    assert len(begun) == 4


@pytest.mark.parametrize(("code", "call"), [(errno.EACCES, "stat"), (errno.EACCES, "listdir"), (errno.EINTR, "stat")])
def test_a_folder_that_this_user_may_not_enter_is_no_failure_of_the_run(tmp_path, monkeypatch, code, call):
    """It was an exception of the task, which the run tried twice; an interrupted call passes."""
    monkeypatch.setattr(away, "PAUSES_S", (0.0,))
    (tmp_path / "private").mkdir()
    (tmp_path / "private/a.jsonl").write_text('{"x": 1}\n')
    FileServer(code, "private", call).install(monkeypatch)
    if code == errno.EINTR:
        assert len(open_dataset(tmp_path / "private/*.jsonl")) == 1
        return
    with pytest.raises(
        UserError, match=r"private.*(cannot be read: Permission denied|no file matches)|no file matches.*private"
    ):
        open_dataset(tmp_path / "private/*.jsonl")
