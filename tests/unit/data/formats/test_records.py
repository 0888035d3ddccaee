"""Files of records as data: JSON lines, tars as WebDataset writes them, Parquet."""

import functools
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable, Hashable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpctrain
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.formats.table_dataset import open_table_dataset
from hpctrain.data.formats.tables import open_table
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData
from hpctrain.data.samples import Recipe
from hpctrain.errors import UserError

LENGTH = 29
RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(1, 99, 1 + index % 4).tolist() for index in range(LENGTH)]
PAD = functools.partial(hpctrain.pad, fields=["tokens"])


def write_json(path: Path, rows: range) -> None:
    lines = [json.dumps({"tokens": TOKENS[i], "id": i, "text": "a" * (i % 5)}) for i in rows]
    path.write_text("\n".join(lines[:5]) + "\r\n\n" + "\n".join(lines[5:]))


def write_tar(path: Path, rows: range) -> None:
    with tarfile.open(path, "w") as tar:
        for i in rows:
            array = io.BytesIO()
            np.save(array, np.array(TOKENS[i]))
            files = {"tokens.npy": array.getvalue(), "id": str(i).encode(), "text": b"a" * (i % 5)}
            for name, content in files.items():
                info = tarfile.TarInfo(f"part/{i:04d}.{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def write_parquet(path: Path, rows: range) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(
        {"tokens": [TOKENS[i] for i in rows], "id": list(rows), "text": ["a" * (i % 5) for i in rows]}
    )
    pyarrow.parquet.write_table(table, path, row_group_size=4)


def encode_json(record: dict) -> dict:
    return {"tokens": record["tokens"], "id": record["id"], "letters": len(record["text"])}


def encode_tar(record: dict) -> dict:
    tokens = np.load(io.BytesIO(record["tokens.npy"]), allow_pickle=False)
    assert record["__key__"] == f"part/{int(record['id']):04d}"
    return {"tokens": tokens, "id": int(record["id"]), "letters": len(record["text"])}


KINDS = {
    "jsonl": (write_json, encode_json, "tokens"),
    "tar": (write_tar, encode_tar, "tokens.npy"),
    "parquet": (write_parquet, encode_json, "tokens"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """With two files of the kind in the folder."""
    pytest.importorskip("pyarrow.parquet")
    write = KINDS[request.param][0]
    write(tmp_path / f"a-0.{request.param}", range(17))
    write(tmp_path / f"a-1.{request.param}", range(17, LENGTH))
    return str(request.param)


def test_records_are_samples_in_any_order(kind, tmp_path):
    dataset = open_dataset(tmp_path / f"a-*.{kind}", ragged=True, decode=KINDS[kind][1])
    assert len(dataset) == LENGTH and list(dataset.fields) == ["tokens", "id", "letters"]
    order = RNG.permutation(LENGTH)
    read = dataset.read(order)
    assert [tokens.tolist() for tokens in read["tokens"]] == [TOKENS[i] for i in order]
    assert read["id"].tolist() == order.tolist() and read["letters"].tolist() == (order % 5).tolist()
    other = open_dataset(tmp_path / f"a-1.{kind}", ragged=True, decode=KINDS[kind][1])
    assert dataset.fingerprint() != other.fingerprint()


def test_a_file_system_may_give_a_record_in_several_parts(kind, tmp_path, monkeypatch):
    really = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, offset: really(file, min(length, 7), offset))
    dataset = open_dataset(tmp_path / f"a-0.{kind}", ragged=True, decode=KINDS[kind][1])
    assert [tokens.tolist() for tokens in dataset.read(np.arange(17))["tokens"]] == TOKENS[:17]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_decodes_what_it_trains_on(kind, size, tmp_path):
    epochs = []
    for rank in range(size):
        calls: list[int] = []

        def decode(record, calls=calls):
            calls.append(int(record["id"]))
            return KINDS[kind][1](record)

        dataset = open_dataset(tmp_path / f"a-*.{kind}", ragged=True, decode=decode)
        calls.clear()  # the first record of a file tells the shapes
        data = TrainingData(dataset, Order(LENGTH, 8), rank, size, prefetch=0, recipe=Recipe(collate=PAD))
        assert [batch.ends_epoch for batch in islice(data.starting_at(0, 0), 4)] == [False] * 3 + [True]
        data.close()
        epochs.append(calls)
    assert sorted(i for calls in epochs for i in calls) == list(range(LENGTH))


@pytest.mark.slow
def test_worker_processes_read_them(kind, tmp_path):
    """Also if a function names the files."""
    pattern = f"{tmp_path}/a-*.{kind}"
    source = functools.partial(os.path.join, pattern) if kind == "jsonl" else pattern
    dataset = open_dataset(source, ragged=True, decode=KINDS[kind][1])

    def take(workers):
        data = TrainingData(
            dataset,
            Order(LENGTH, 8, shuffle="block", block_samples=4),
            0,
            1,
            workers=workers,
            recipe=Recipe(collate=PAD),
        )
        try:
            return [batch.micro_batches[0] for batch in islice(data.starting_at(0, 1), 5)]
        finally:
            data.close()

    for one, other in zip(take(0), take(1), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in ("tokens", "id", "letters"))


def test_numbers_need_no_function(kind, tmp_path):
    tokens = KINDS[kind][2]
    dataset = open_dataset(tmp_path / f"a-0.{kind}", [tokens, "id"], ragged=True)
    read = dataset.read(np.array([3, 1]))
    assert read[tokens][0].tolist() == TOKENS[3] and read["id"].tolist() == [3, 1]
    assert dataset.fields["id"].dtype == np.int64
    with pytest.raises(UserError, match=r"decode=function"):
        open_dataset(tmp_path / f"a-0.{kind}")
    with pytest.raises(UserError, match=r"for sample \d+ where .* was expected|lists of 1 to 4 values"):
        open_dataset(tmp_path / f"a-0.{kind}", [tokens, "id"]).read(np.arange(8))
    with pytest.raises(UserError, match="has no 'label'"):
        open_dataset(tmp_path / f"a-0.{kind}", ["label"])


def test_a_record_that_fails_is_named(kind, tmp_path):
    def fail(record):
        if int(record["id"]) == 3:
            raise ValueError("odd")
        return {"id": int(record["id"])}

    with pytest.raises(UserError, match=rf"a-0.{kind}, record 3: ValueError: odd \(test_records.py"):
        open_dataset(tmp_path / f"a-0.{kind}", decode=fail).read(np.arange(5))


@pytest.mark.parametrize(("name", "write"), [("a.jsonl", write_json), ("a.parquet", write_parquet)])
def test_a_file_that_changes_is_told(tmp_path, name, write):
    write(tmp_path / name, range(9))
    dataset = open_dataset(tmp_path / name, ["id"])
    write(tmp_path / name, range(9, 18))
    with pytest.raises(UserError, match="has changed since the run opened it"):
        dataset.read(np.arange(9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"x": 1}\n{"x": 1', "record 1 is not JSON: "),
        ('{"x": 1}\n[1]', "record 1 is not a JSON object"),
        ('{"x": 1}\n{"x": 1.5}', r"gives x float64 for sample 1 where x int64"),
        ("\n\n", "holds no records"),
    ],
)
def test_lines_that_are_wrong(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        open_dataset(path).read(np.arange(2))


def test_whole_numbers_among_others_and_empty_lists(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1.5, "y": [1]}\n{"x": 2, "y": []}')
    read = open_dataset(path, ragged=True).read(np.arange(2))
    assert read["x"].tolist() == [1.5, 2.0] and [y.dtype for y in read["y"]] == [np.int64] * 2


def test_nothing_is_unpickled(tmp_path):
    array = io.BytesIO()
    np.save(array, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for name, content in (("x.npy", array.getvalue()), ("x.pyd", pickle.dumps(1)), ("x.pth", b"")):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            info = tarfile.TarInfo(f"0.{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        with pytest.raises(UserError, match=rf"a.tar: 0.{name} "):
            open_dataset(tmp_path / "a.tar")


def test_files_that_do_not_go_together(tmp_path):
    write_json(tmp_path / "a.jsonl", range(9))
    write_tar(tmp_path / "a.tar", range(9))
    with pytest.raises(UserError, match=r"several kinds are given as one: \.jsonl, \.tar"):
        open_dataset([tmp_path / "a.jsonl", tmp_path / "a.tar"])
    (tmp_path / "b.tar").write_bytes(b"no tar")
    with pytest.raises(UserError, match=r"b\.tar is not a tar file"):
        open_dataset(tmp_path / "b.tar")
    with pytest.raises(UserError, match=r"absent\.jsonl cannot be read: No such file"):
        open_dataset(tmp_path / "absent.jsonl")


class NotingCache(BlockCache):
    """Keeps no block, and notes which were wanted, each a row group by its number."""

    def __init__(self) -> None:
        super().__init__(0)
        self.groups: set[int] = set()

    def get(self, key: Hashable, read: Callable[[], Any]) -> Any:
        assert isinstance(key, tuple)
        self.groups.add(int(key[0].rpartition(" ")[2]))
        return read()


def groups_read(path: Path, order: Order, rank: int, size: int, batches: int) -> list[set[int]]:
    """Row groups that a rank needs for each of its first batches."""
    cache = NotingCache()
    dataset = open_table_dataset(open_table(str(path), "parquet"), ("id",), cache, False, None)
    data = TrainingData(dataset, order, rank, size, prefetch=0)
    batches_of_rank, found = data.starting_at(0, 0), []
    for _ in range(batches):
        cache.groups = set()
        next(batches_of_rank)
        found.append(cache.groups)
    data.close()
    return found


@pytest.mark.parametrize(
    ("group_rows", "expected"),
    [
        (4, [[{0, 1}, {4, 5}], [{2, 3}, {6, 7}]]),  # each rank its own
        (6, [[{0, 1}, {2, 3}], [{1, 2}, {4, 5}]]),  # both need those that the cut goes through
        (32, [[{0}, {0}], [{0}, {0}]]),  # one for both
    ],
)
def test_a_rank_reads_the_row_groups_that_hold_its_samples(tmp_path, group_rows, expected):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"id": list(range(32))}), path, row_group_size=group_rows)
    order = Order(length=32, global_batch=16, seed=0, shuffle="none")
    assert [groups_read(path, order, rank, 2, 2) for rank in range(2)] == expected


def test_integers_that_no_type_holds_together_are_refused(tmp_path):
    """NumPy made them floats, rounded."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"x": [-1, 2**63 + 1]}) + "\n")
    with pytest.raises(UserError, match=r"'x' holds integers below 0 and from 2\*\*63 on"):
        open_dataset(path)
    for values in ([1, 2**63 + 1], [-1.0, 1e300], [-(2**63), 2**63 - 1]):
        path.write_text(json.dumps({"x": values}) + "\n")
        assert open_dataset(path).read(np.array([0]))["x"].tolist() == [values]
