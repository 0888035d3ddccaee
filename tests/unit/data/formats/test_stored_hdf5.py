"""HDF5 files in a store: the samples of the local file, through failures of the store, and no other samples ever."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.data.dataset import Dataset
from hpctrain.data.formats import stored_hdf5
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.info import sources_of
from hpctrain.data.packing.pack_source import packed_notes
from hpctrain.errors import UserError
from hpctrain.system import object_store as object_store_module
from hpctrain.system.object_store import opened
from tests.support.object_store import ObjectStore

pytest.importorskip("obstore", reason="the extra lake is not installed")

ROWS = 2000
X = np.random.default_rng(0).normal(size=(ROWS, 32))


def write(path: Path, rows: slice = slice(None)) -> Path:
    """Contiguous, chunked, compressed and of several numbers a value."""
    with h5py.File(path, "w") as file:
        file["x"] = X[rows]
        file["z"] = X[rows, :3].astype(">f8")
        file.create_dataset("y", data=X[rows, :8].astype(np.float32), chunks=(64, 8))
        file.create_dataset("id", data=np.arange(ROWS)[rows], chunks=(100,), compression="gzip")
        file.attrs["hpctrain"] = '{"classes": ["a", "b"]}'
    return path


@pytest.fixture
def bucket(tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a.h5; blocks are small, and the store is given up early."""
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_hdf5, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(stored_hdf5, "SEGMENT_BYTES", 3 * 2**16)
    monkeypatch.setattr(object_store_module, "RETRIES", 2)
    url = object_store.make_bucket(tmp_path.name.replace("_", "-"))
    put(f"{url}/a.h5", write(tmp_path / "a.h5"))
    return url


def put(url: str, path: Path) -> None:
    folder, _, name = url.rpartition("/")
    opened(folder).put(name, path)


def orders() -> Iterator[np.ndarray]:
    yield np.arange(ROWS)
    yield np.random.default_rng(1).permutation(ROWS)[:200]
    yield np.array([ROWS - 1, 0, 0, 7])


def same(one: Dataset, other: Dataset, indices: np.ndarray) -> bool:
    a, b = one.read(indices), other.read(indices)
    return a.keys() == b.keys() and all(
        np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


def test_samples_are_those_of_the_local_file_and_each_block_is_fetched_once(
    bucket: str, tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, stored, other = (open_dataset(each) for each in (tmp_path / "a.h5", f"{bucket}/a.h5", f"{bucket}/a.h5"))
    assert len(stored) == ROWS and dict(stored.fields) == dict(local.fields)
    before = object_store.reads()
    with ThreadPoolExecutor(2) as threads:  # as two ranks of a node
        assert all(threads.map(lambda data: all(same(data, local, each) for each in orders()), (stored, other)))
    blocks = -(-(tmp_path / "a.h5").stat().st_size // 2**16)
    assert object_store.reads() <= before + blocks, "the head of the object is not read"
    before = object_store.reads()
    del stored
    gc.collect()
    assert same(other, local, np.arange(ROWS)), "it is closed by itself"
    assert not list((tmp_path / "cache").glob("*.block.*.lock"))
    again = open_dataset(f"{bucket}/a.h5", ["id", "x"], cache_bytes=2**20)
    assert same(again, open_dataset(tmp_path / "a.h5", ["id", "x"]), np.arange(ROWS))
    assert object_store.reads() == before, "the node's disk has all blocks"
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "file"))
    assert same(open_dataset(f"{bucket}/a.h5"), local, np.arange(ROWS)), "memory does without the disk"


@pytest.mark.parametrize("block", [64, 100, 1000])
@pytest.mark.parametrize("has_disk", [True, False])
def test_samples_that_lie_in_several_blocks(
    block: int, has_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_hdf5, "BLOCK_BYTES", block)
    monkeypatch.setattr(stored_hdf5, "SEGMENT_BYTES", 7 * block)
    if not has_disk:
        (tmp_path / "cache").touch()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["wide"], file["narrow"] = X[:50, :31], np.arange(50, dtype=np.int16)
    local, stored = open_dataset(tmp_path / "a.h5"), open_dataset(f"file://{tmp_path}/a.h5")
    for indices in ([49], [], [3, 0, 48, 3], range(50), range(49, -1, -1)):
        assert same(stored, local, np.array(indices, np.int64))


def test_a_disk_that_becomes_full_is_done_without(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, local = open_dataset(f"{bucket}/a.h5"), open_dataset(tmp_path / "a.h5")
    written = []

    def full(handle: int, content: bytes, place: int) -> int:
        written.append(place)
        return len(content) // 2 if len(written) == 9 else pwrite(handle, content, place)

    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    assert all(same(stored, local, indices) for indices in orders()) and len(written) >= 9


def test_several_files_in_one_order(bucket: str, tmp_path: Path) -> None:
    put(f"{bucket}/part-1.h5", write(tmp_path / "1.h5", slice(700, ROWS)))
    put(f"{bucket}/part-0.h5", write(tmp_path / "0.h5", slice(0, 700)))
    local = open_dataset(tmp_path / "a.h5")
    for source in (f"{bucket}/part-*.h5", [f"{bucket}/part-0.h5", f"{bucket}/part-1.h5"], f"file://{tmp_path}/[01].h5"):
        assert all(same(open_dataset(source), local, indices) for indices in orders())
    with pytest.raises(UserError, match=r"no object matches s3://.*other-\*\.h5"):
        open_dataset(f"{bucket}/other-*.h5")


def test_what_it_is_stands_in_the_record(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/a.h5"
    dataset = open_dataset(url)
    (source,) = sources_of(dataset)
    assert (source["address"], source["kind"], source["rows"]) == (url, "hdf5", ROWS)
    assert packed_notes(url) == {"classes": ["a", "b"]}
    assert dataset.fingerprint() == open_dataset(url).fingerprint()
    put(url, write(tmp_path / "b.h5", slice(1, None)))
    assert open_dataset(url).fingerprint() != dataset.fingerprint()


def test_commands_read_it(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", f"{bucket}/a.h5", "--seconds", "0"]) == 0
    assert f"{ROWS}" in capsys.readouterr().out
    assert main(["data", "pack", f"{bucket}/a.h5", "-o", str(tmp_path / "out.h5")]) == 0
    assert same(open_dataset(tmp_path / "out.h5"), open_dataset(tmp_path / "a.h5"), np.arange(ROWS))


@pytest.mark.parametrize("how", ["busy", "half", "slow"])
def test_a_store_that_fails_for_a_moment_is_asked_again(
    how: str, bucket: str, tmp_path: Path, object_store: ObjectStore
) -> None:
    stored = open_dataset(f"{bucket}/a.h5")
    object_store.fail(how, 2)
    assert same(stored, open_dataset(tmp_path / "a.h5"), np.arange(ROWS))


def test_what_goes_wrong_is_named(bucket: str, tmp_path: Path, object_store: ObjectStore) -> None:
    stored = open_dataset(f"{bucket}/a.h5")
    for how, said in (
        ("expired", r"the credentials for s3://.*a\.h5 have expired: .*The provided token"),
        ("skewed", r"s3://.*a\.h5 cannot be read: RequestTimeTooSkewed: The diff"),
    ):
        object_store.fail(how, 10**6)
        with pytest.raises(UserError, match=said):
            stored.read(np.arange(ROWS))
    object_store.fail("", 0)
    with pytest.raises(UserError, match=r"s3://.*b\.h5 does not exist"):
        open_dataset(f"{bucket}/b.h5")
    (tmp_path / "text").write_text("no HDF5")
    put(f"{bucket}/c.h5", tmp_path / "text")
    with pytest.raises(UserError, match=r"s3://.*c\.h5 cannot be read: .*file signature not found"):
        open_dataset(f"{bucket}/c.h5")


def test_an_object_that_changes_is_an_error_and_never_other_samples(bucket: str, tmp_path: Path) -> None:
    stored = open_dataset(f"{bucket}/a.h5")
    assert np.array_equal(stored.read(np.array([0]))["x"], X[:1])
    put(f"{bucket}/a.h5", write(tmp_path / "b.h5", slice(None, None, -1)))
    with pytest.raises(UserError, match=r"s3://.*a\.h5 has changed since the run opened it"):
        stored.read(np.arange(ROWS))
    assert np.array_equal(open_dataset(f"{bucket}/a.h5").read(np.arange(ROWS))["x"], X[::-1]), "no block of the old one"


def test_it_leads_to_no_other_file(bucket: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink("a.h5", "/x")
        layout = h5py.VirtualLayout((ROWS,), np.int64)
        layout[:] = h5py.VirtualSource("a.h5", "id", (ROWS,))
        file.create_virtual_dataset("id", layout)
    put(f"{bucket}/link.h5", tmp_path / "link.h5")
    for name in ("x", "id"):
        with pytest.raises(UserError, match=r"link\.h5: .* leads to the file a\.h5, which is not supported"):
            open_dataset(f"{bucket}/link.h5", [name])


def test_a_damaged_block_on_the_nodes_disk_is_fetched_again(bucket: str, tmp_path: Path) -> None:
    open_dataset(f"{bucket}/a.h5").read(np.arange(ROWS))
    for block in (tmp_path / "cache").glob("*.block"):
        block.write_bytes(b"half")
    assert same(open_dataset(f"{bucket}/a.h5"), open_dataset(tmp_path / "a.h5"), np.arange(ROWS))


@pytest.mark.slow
def test_a_process_with_an_open_file_ends_well(bucket: str) -> None:
    code = """
import sys, threading
import hpctrain

data = hpctrain.open_dataset(sys.argv[1])
threading.Thread(target=lambda data: threading.Event().wait(), args=[data], daemon=True).start()  # as a prefetch may
print(len(data))
"""
    done = subprocess.run([sys.executable, "-c", code, f"{bucket}/a.h5"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{ROWS}\n"), done.stderr
