"""Tables whose parts are slow to read, or have no rows."""

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hpctrain import open_dataset
from hpctrain.data.dataset import Samples
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.table_dataset import DecodedPart, open_table_dataset, whole
from hpctrain.data.formats.tables import Table, TablePart
from hpctrain.errors import RunFailed, UserError

pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")

SCHEMA = pyarrow.schema({"id": pyarrow.int64(), "x": pyarrow.list_(pyarrow.int64())})


class Store:
    """Of a table that has as many rows in each part as is said; no reader knows that without looking."""

    def __init__(self, *counts: int) -> None:
        self.ends = np.cumsum(counts).tolist()
        self.counts = counts
        self.reads = 0
        self.failure: OSError | None = None

    def part(self, index: int) -> TablePart:
        def scan(columns: Sequence[str]) -> Iterator[Any]:
            if self.failure is not None:
                raise self.failure
            ids = list(range(self.ends[index] - self.counts[index], self.ends[index]))
            batch = pyarrow.RecordBatch.from_pydict({"id": ids, "x": [[one, -one] for one in ids]}, SCHEMA)
            self.reads += "x" in columns
            yield from [batch.select(list(columns))] if ids else []

        return TablePart(f"part {index}", f"part {index}", None, scan)

    def open(self, ragged: bool = False) -> Any:
        parts = [self.part(index) for index in range(len(self.counts))]
        origin = {"kind": "parquet", "files_sha256": ""}
        dataset = open_table_dataset(Table("s3://here", SCHEMA, parts, origin, True), None, BlockCache(0), ragged, None)
        self.reads = 0
        return dataset


def test_a_column_too_large_for_one_array_is_refused():
    """Arrow combines text and lists up to 2 GiB; the rest was left out, and the file said to have changed."""
    rows = pyarrow.table({"text": pyarrow.chunked_array([["a"], ["b"]])})
    with pytest.raises(UserError, match="part 0: column 'text' has more than 2 GiB of values in a row group"):
        whole(rows, "text", Store(2).part(0))
    assert whole(rows.combine_chunks(), "text", Store(2).part(0)).to_pylist() == ["a", "b"]


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.data.formats.away.PAUSES_S", ())


def is_right(samples: Samples, ids: Sequence[int]) -> bool:
    wanted = np.array(ids)
    return np.array_equal(samples["id"], wanted) and np.array_equal(
        np.stack(list(samples["x"])), np.stack([wanted, -wanted], axis=1)
    )


@pytest.mark.parametrize("ragged", [False, True])
def test_a_store_that_goes_away(ragged):
    store = Store(3, 3)
    dataset = store.open(ragged)
    assert is_right(dataset.read(np.arange(6)), range(6))
    store.failure = OSError("the store is away")
    with pytest.raises(RunFailed, match=r"part 0 does not answer: the store is away"):
        dataset.read(np.arange(2))


@pytest.mark.parametrize("ragged", [False, True])
def test_parts_without_rows(ragged):
    assert is_right(Store(0, 2, 0, 1).open(ragged).read(np.array([2, 0, 1])), [2, 0, 1])


def test_few_parts_are_in_memory_at_once_and_each_is_read_once(monkeypatch):
    store = Store(*[2] * 40)
    dataset = store.open()
    alive: list[weakref.ref[DecodedPart]] = []
    most = 0
    get = BlockCache.get

    def noted(cache, key, read):
        nonlocal most
        part = get(cache, key, read)
        alive.append(weakref.ref(part))
        most = max(most, sum(one() is not None for one in alive))
        return part

    monkeypatch.setattr(BlockCache, "get", noted)
    wanted = np.random.default_rng(0).permutation(len(dataset))
    assert is_right(dataset.read(wanted), wanted.tolist())
    assert store.reads == len(store.counts) and most <= 2


@pytest.mark.parametrize("ragged", [False, True])
def test_a_part_that_is_larger_than_the_cache_is_not_read_again_for_each_batch(ragged):
    store = Store(20, 20)
    dataset = store.open(ragged)
    for begin in range(0, 40, 4):
        assert dataset.read(np.arange(begin, begin + 4))["id"].tolist() == list(range(begin, begin + 4))
    assert store.reads == 2 - ragged, "to decode rows, the first part was read when the table was opened"


def test_parts_in_memory_take_no_descriptors(tmp_path):
    from pyarrow import parquet

    rows = pyarrow.table({"x": np.arange(600)})
    parquet.write_table(rows, tmp_path / "rows.parquet", row_group_size=2)
    dataset = open_dataset(tmp_path / "rows.parquet")
    open_before = len(os.listdir("/proc/self/fd"))
    assert dataset.read(np.arange(600)[::-1])["x"].tolist() == list(range(600))[::-1]
    assert len(os.listdir("/proc/self/fd")) < open_before + 50
