"""Folders of tables whose files have different types: promoted where nothing is lost, else refused by file and row."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.packing.pack_source import parse_fields
from hpctrain.data.packing.read import open_source
from hpctrain.data.packing.write import write_hdf5
from hpctrain.errors import UserError

LARGE = 2**53 + 1
"""The first whole number that float64 rounds."""


def folder(path: Path, *columns: Any) -> Path:
    for index, column in enumerate(columns):
        parquet.write_table(pa.table({"a": column}), path / f"{index}.parquet")
    return path


def opened(path: Path) -> list[Any]:
    data = open_dataset(str(path))
    return data.read(np.arange(len(data)))["a"].tolist()  # type: ignore[no-any-return]


def packed(path: Path) -> list[Any]:
    write_hdf5(path / "packed.h5", open_source([str(path)], "parquet"))
    return opened(path / "packed.h5")


WAYS = pytest.mark.parametrize("values_of", [opened, packed])


@WAYS
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([1.5], pa.float32()), pa.array([1e300])),
        (pa.array(np.float16([1.5])), pa.array([70000.0], pa.float32())),
        (pa.array([1], pa.int32()), pa.array([2**40])),
        (pa.array([1]), pa.array([0.5], pa.float32())),
        (pa.array([[1, 2]], pa.list_(pa.int32())), pa.array([[2**40, 3]])),
        (pa.array([[], []], pa.list_(pa.int32())), pa.array([[]], pa.list_(pa.int32()))),
    ],
    ids=str,
)
def test_types_are_promoted_where_nothing_is_lost(tmp_path, values_of, first, second):
    assert values_of(folder(tmp_path, first, second)) == [*first.to_pylist(), *second.to_pylist()]


@WAYS
@pytest.mark.parametrize(
    ("second", "kind"),
    [(pa.array([2]), "int64"), (pa.array(["08"]), "string"), (pa.array([5], pa.timestamp("us")), r"timestamp\[us\]")],
    ids=str,
)
def test_types_without_a_common_one_are_refused_by_file_and_column(tmp_path, values_of, second, kind):
    first = pa.array([True]) if kind == "int64" else pa.array([1])
    with pytest.raises(UserError, match=rf"1\.parquet: column 'a' holds {kind}, and (bool|int64) in files before it"):
        values_of(folder(tmp_path, first, second))


@WAYS
def test_a_value_that_the_common_type_rounds_is_refused_by_row(tmp_path, values_of):
    with pytest.raises(UserError, match=rf"0\.parquet: column 'a' has {LARGE} in row 2, which double does not hold"):
        values_of(folder(tmp_path, pa.array([1, 2, LARGE]), pa.array([0.5])))


@WAYS
def test_what_is_wrong_with_a_table_is_said(tmp_path, values_of):
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    parquet.write_table(twice, tmp_path / "0.parquet")
    with pytest.raises(UserError, match="two columns of the same name"):
        values_of(tmp_path)
    (tmp_path / "0.parquet").unlink()
    (tmp_path / "a=1").mkdir()
    with pytest.raises(UserError, match="name of a key of its folders"):
        values_of(folder(tmp_path / "a=1", pa.array(["x"])).parent)
    pairs = pa.array([[1, 2], [3, None]], pa.list_(pa.int32(), 2))
    (tmp_path / "a=1" / "0.parquet").unlink()
    with pytest.raises(UserError, match="column 'a' has no value in row 1"):
        values_of(folder(tmp_path, pairs))
    with pytest.raises(UserError, match="without a value in a column of lists of fixed size"):
        values_of(folder(tmp_path, pa.array([[1, 2], None], pairs.type)))


def test_only_the_columns_in_use_must_agree(tmp_path):
    for index, other in enumerate([pa.array([1]), pa.array(["x"])]):
        parquet.write_table(pa.table({"a": [float(index)], "b": other}), tmp_path / f"{index}.parquet")
    assert open_dataset(str(tmp_path), ["a"]).read(np.arange(2))["a"].tolist() == [0.0, 1.0]


def test_packing_rounds_no_whole_numbers(tmp_path):
    parquet.write_table(pa.table({"i": [1, LARGE], "x": [0.5, 0.5]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=rf"'i' of sample 1 holds {LARGE}, which float64 cannot hold"):
        source = open_source([str(tmp_path / "t.parquet")], columns=parse_fields(["both=i,x"]))
        write_hdf5(tmp_path / "both.h5", source)
    source = open_source([str(tmp_path / "t.parquet")], columns=parse_fields(["i"]))
    with pytest.raises(UserError, match=f"{LARGE}, which float32 cannot hold"):
        write_hdf5(tmp_path / "i.h5", source, {"i": np.dtype(np.float32)})


def test_json_lines_round_no_whole_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"a": 0.5}}\n{{"a": 3}}\n{{"a": {LARGE}}}\n')
    data = open_dataset(tmp_path / "a.jsonl")
    assert data.read(np.arange(2))["a"].tolist() == [0.5, 3.0]
    with pytest.raises(UserError, match="int64 for sample 2"):
        data.read(np.array([2]))
