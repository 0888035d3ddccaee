"""Data that is not in files."""

import glob
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.dataset import Field
from hpctrain.data.formats.sources import matching, open_dataset
from hpctrain.errors import UserError

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20)


def test_they_are_read_by_index():
    dataset = open_dataset({"x": X, "y": Y.astype(">i4")})
    assert dataset.fields == {"x": Field((3,), np.dtype(np.float32)), "y": Field((), np.dtype(np.int32))}
    samples = dataset.read(np.array([5, 2, 5]))
    assert np.array_equal(samples["x"], X[[5, 2, 5]])
    assert samples["y"].dtype.isnative and samples["y"].tolist() == [5, 2, 5]


def test_what_is_read_is_a_copy():
    mine = X.copy()
    open_dataset({"x": mine}).read(Y)["x"][:] = 0
    assert np.array_equal(mine, X)


def test_a_dataset_is_taken_as_it_is():
    dataset = open_dataset({"x": X})
    assert open_dataset(dataset) is dataset


def test_a_function_is_called_for_its_data():
    dataset = open_dataset(lambda: {"x": X, "y": Y}, fields=["y"])
    assert (len(dataset), list(dataset.fields)) == (20, ["y"])
    assert dataset.read(np.array([3]))["y"].tolist() == [3]
    assert dataset.fingerprint() == open_dataset({"y": Y}).fingerprint()


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"x": X, "y": Y[:-1]}, "different numbers of samples: 'x' 20, 'y' 19"),
        ({"x": X[:0]}, "no samples"),
        ({}, "no arrays"),
        ({"x": np.array([{}, []], dtype=object)}, "'x' has dtype object"),
        ({"x": np.array(["a"])}, "'x' has dtype <U1"),
        ({"x": 3.0}, "without a sample axis"),
    ],
)
def test_wrong_arrays_are_refused(arrays, what):
    with pytest.raises(UserError, match=what):
        open_dataset(arrays)


def test_a_missing_name_is_refused_with_those_present():
    with pytest.raises(UserError) as caught:
        open_dataset({"x": X, "y": Y}, fields=["label"])
    assert "'label'" in caught.value.what and "x, y" in caught.value.fix


@pytest.mark.parametrize("kind", [str, Path])
def test_a_pattern_means_files_of_tables(kind, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    from pyarrow import parquet

    for name in ("b", "a", "c[1]"):
        parquet.write_table(pyarrow.table({"name": [ord(name[0])]}), tmp_path / f"{name}.parquet")
    for pattern, names in [("*.parquet", "abc"), ("[ab].parquet", "ab"), ("c[1].parquet", "c"), ("b.parquet", "b")]:
        dataset = open_dataset(kind(tmp_path / pattern))
        assert bytes(dataset.read(np.arange(len(dataset)))["name"].tolist()).decode() == names
    with pytest.raises(UserError, match="no file matches"):
        open_dataset(kind(tmp_path / "no*.parquet"))


@pytest.mark.parametrize("source", [5, [], [X], None])
def test_anything_else_is_refused(source):
    with pytest.raises(UserError, match="cannot be opened"):
        open_dataset(source)


PATTERNS = [
    "*.h5",
    "**/*.h5",
    "**",
    "a/**",
    "**/b/*.h5",
    "**/b/**/x.h5",
    "a/[bx]*",
    ".h/*",
    "no/*",
    "x.h5/*",
    "a**/x.h5",
]


@pytest.mark.parametrize("pattern", [*PATTERNS, "x.h5", "x", "*/*/x.h5", "d[[]1]/?.h5", "link/*/*", "*/../x.h5"])
def test_patterns_match_what_they_match_in_the_library(tmp_path, pattern):
    for name in ("a/x.h5", "a/b/y.h5", "a/b/.z.h5", ".h/x.h5", "x.h5", "d[1]/x.h5", "e/b/c/b/x.h5"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = {str(path) for path in matching(tmp_path, Path(pattern).parts)}
    assert found == {str(Path(each)) for each in glob.glob(f"{tmp_path}/{pattern}", recursive=True)}
