"""Tables in an object store: packed as they are, or refused in one sentence."""

import uuid
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.resume_compat import identity_of, refuse_changes
from hpctrain.cli import main
from hpctrain.data.dataset import Dataset, Field
from hpctrain.data.formats import tables
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.formats.tables import filesystem_of, open_table
from hpctrain.data.info import sources_of
from hpctrain.data.order import Order
from hpctrain.data.packing.pack_source import packed_notes
from hpctrain.data.packing.table import from_table
from hpctrain.data.packing.write import write_hdf5
from hpctrain.data.pipeline import TrainingData
from hpctrain.errors import UserError
from tests.support.object_store import ObjectStore

pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")

IDS = np.arange(1000)
X = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(rows: slice) -> pyarrow.Table:
    return pyarrow.table(
        {"id": IDS[rows], "x": X[rows].tolist()}, pyarrow.schema({"id": "int64", "x": pyarrow.list_(pyarrow.float32())})
    )


@pytest.fixture
def bucket(object_store: ObjectStore) -> str:
    """A new one, by its URI."""
    return object_store.make_bucket(f"bucket-{uuid.uuid4().hex}")


def write(uri: str, rows: slice) -> None:
    from pyarrow import parquet
    from pyarrow.fs import FileSystem

    store, path = FileSystem.from_uri(uri)
    with store.open_output_stream(path) as file:
        parquet.write_table(table(rows), file, row_group_size=150)


@pytest.fixture
def in_store(bucket: str) -> str:
    """The table in two files of several row groups."""
    write(f"{bucket}/table/a.parquet", slice(0, 700))
    write(f"{bucket}/table/b.parquet", slice(700, 1000))
    return f"{bucket}/table"


def pack(*words: object) -> int:
    return main(["data", "pack", *map(str, words)])


def ids(path: str) -> list[int]:
    dataset = open_dataset(path)
    samples = dataset.read(np.arange(len(dataset)))
    assert np.array_equal(samples["x"], X[samples["id"]])
    return samples["id"].tolist()  # type: ignore[no-any-return]


def test_a_folder_in_an_object_store(in_store):
    assert pack(in_store, "--kind", "parquet", "-o", "a.h5") == 0
    assert ids("a.h5") == list(range(1000))
    (source,) = packed_notes("a.h5")["sources"]
    assert (source["uri"], source["files"], source["rows"]) == (in_store, 2, 1000)


class TestFaults:
    """Of the store: retried, or one sentence; never other samples."""

    @pytest.mark.parametrize(("how", "times"), [("busy", 2), ("half", 1), ("slow", 3)])
    def test_a_store_that_fails_for_a_moment(self, how, times, in_store, object_store):
        source = from_table(open_table(in_store, "parquet"), None)
        object_store.fail(how, times)
        assert np.concatenate([block["id"] for block in source.blocks()]).tolist() == IDS.tolist()

    @pytest.mark.parametrize(
        ("how", "code", "says"), [("busy", 70, "does not answer"), ("expired", 64, "have expired")]
    )
    def test_a_store_that_goes_on_failing(
        self,
        how,
        code,
        says,
        in_store,
        object_store,
        capsys,
        monkeypatch,
    ):
        monkeypatch.setattr("hpctrain.data.formats.away.PAUSES_S", ())
        object_store.fail(how, 10**6)
        assert pack(in_store, "--kind", "parquet", "-o", "a.h5") == code
        said = capsys.readouterr().err
        assert says in said
        assert "secret-of-somebody" not in said and not Path("a.h5").exists()

    def test_a_run_waits_for_a_store_that_is_away_when_it_starts(self, in_store, monkeypatch):
        real, tries = tables.filesystem_of, []

        def away(address):
            tries.append(address)
            if len(tries) < 3:
                raise OSError("curlCode: 7, Couldn't connect to server")
            return real(address)

        monkeypatch.setattr("hpctrain.data.formats.away.PAUSES_S", (0.0, 0.0))
        monkeypatch.setattr(tables, "filesystem_of", away)
        assert len(open_table(in_store, "parquet").parts) > 0
        assert len(tries) == 3

    def test_a_table_that_is_rewritten_during_a_run(self, in_store):
        dataset = open_dataset(in_store)
        write(f"{in_store}/a.parquet", slice(100, 800))
        assert np.array_equal(dataset.read(np.arange(700, 1000))["x"], X[700:])
        with pytest.raises(UserError, match=r"a\.parquet has changed since the run opened it"):
            dataset.read(np.arange(200))

    def test_an_object_that_is_replaced(self, in_store):
        source = from_table(open_table(in_store, "parquet"), None)
        write(f"{in_store}/a.parquet", slice(100, 800))
        with pytest.raises(UserError, match=r"a\.parquet has changed since the run opened it"):
            list(source.blocks())

    def test_credentials_in_an_address(self, capsys):
        assert pack("s3://somebody:secret@bucket/table", "--kind", "parquet", "-o", "a.h5") == 64
        said = capsys.readouterr().err
        assert "contains credentials" in said and "secret" not in said
        for source in ("s3://somebody:secret@bucket/x.h5", "https://server/x.parquet?sig=secret"):
            with pytest.raises(UserError, match="the address of the data contains credentials") as caught:
                open_dataset(["a.h5", source])
            assert "secret" not in str(caught.value)

    @pytest.mark.parametrize(
        "address",
        [
            "s3://somebody@bucket/table",
            "abfs://container:secret@account.dfs.core.windows.net/table",
            "abfss://:secret@account.dfs.core.windows.net/container/table",
        ],
    )
    def test_what_counts_as_credentials(self, address):
        with pytest.raises(UserError, match="contains credentials"):
            filesystem_of(address)

    def test_an_address_in_azure_names_its_container(self):
        pytest.importorskip("pyarrow._azurefs", reason="this pyarrow was built without Azure")
        for scheme in ("abfs", "abfss"):
            assert filesystem_of(f"{scheme}://container@account.dfs.core.windows.net/table")[1] == "container/table"

    @pytest.mark.parametrize("scheme", ["gs2", "az"])
    def test_an_address_that_no_library_opens(self, scheme, monkeypatch, capsys):
        monkeypatch.setitem(__import__("sys").modules, "adlfs", None)
        assert pack(f"{scheme}://bucket/table", "--kind", "parquet", "-o", "a.h5") == 64
        said = capsys.readouterr().err
        assert f"{scheme}://bucket/table cannot be opened" in said and "plug-in of fsspec" in said


def batches(dataset: Dataset, rank: int, size: int, first: int = 0, **options: object) -> list[dict[str, np.ndarray]]:
    """What a rank gets in the rest of the first epoch and in the second."""
    order = Order(len(dataset), 64, seed=3, shuffle="block", block_samples=100)
    data = TrainingData(dataset, order, rank, size, prefetch=1, **options)
    try:
        given = data.starting_at(0, first)
        return [next(given).micro_batches[0] for _ in range(2 * order.batches_per_epoch - first)]
    finally:
        data.close()


def same(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
        for a, b in zip(one, other, strict=True)
    )


class TestTrainedOnDirectly:
    @pytest.fixture(params=["store", "folder"])
    def source(self, request: pytest.FixtureRequest) -> str:
        """A table of 1000 rows."""
        if request.param == "store":
            return str(request.getfixturevalue("in_store"))
        Path("rows/day=1").mkdir(parents=True)
        Path("rows/day=2").mkdir()
        write(f"file://{Path('rows/day=1/a.parquet').absolute()}", slice(0, 300))
        write(f"file://{Path('rows/day=2/a.parquet').absolute()}", slice(300, 1000))
        return "rows"

    def test_samples_are_those_of_the_packed_file(self, source):
        write_hdf5("a.h5", from_table(open_table(source, "parquet"), {"x": ("x",), "id": ("id",)}))
        packed, direct = open_dataset("a.h5"), open_dataset(source, ["x", "id"])
        assert len(direct) == 1000 and dict(direct.fields) == dict(packed.fields)
        for rank, size in [(0, 1), (0, 2), (1, 2)]:
            assert same(batches(direct, rank, size), batches(packed, rank, size))
        assert same(batches(open_dataset(source, ["x", "id"]), 1, 2, first=7), batches(packed, 1, 2, first=7))

    def test_row_groups_are_kept_in_memory(self, in_store, object_store):
        for ragged in (False, True):
            dataset = open_dataset(in_store, ragged=ragged)
            first = dataset.read(IDS)
            before = object_store.reads()
            assert all(np.array_equal(np.stack(dataset.read(IDS)[name]), np.stack(first[name])) for name in first)
            assert object_store.reads() == before

    @pytest.mark.slow
    def test_worker_processes_read_it(self, in_store):
        dataset = open_dataset(in_store)
        assert same(batches(dataset, 0, 2, workers=1), batches(dataset, 0, 2))

    def test_rows_are_decoded(self, in_store):
        dataset = open_dataset(in_store, decode=lambda row: {"y": row["x"].sum(), "id": row["id"]})
        samples = dataset.read(np.array([999, 3]))
        assert samples["id"].tolist() == [999, 3] and np.allclose(samples["y"], X[[999, 3]].sum(axis=1))

    def test_another_table_has_another_fingerprint_and_a_resume_names_both(self, bucket):
        uris, config = [f"{bucket}/{name}" for name in ("first", "second")], {"seed": 0}
        for uri, rows in zip(uris, [slice(0, 500), slice(0, 600)], strict=True):
            write(f"{uri}/a.parquet", rows)
            assert pack(uri, "--kind", "parquet", "-o", f"{Path(uri).name}.h5") == 0
        for sources in [("first.h5", "second.h5"), tuple(uris)]:
            datasets = [open_dataset(source) for source in sources]
            saved, now = (identity_of(config, 8, each.fingerprint(), sources_of(each)) for each in datasets)
            refuse_changes(saved, saved, "step-3")
            (source,) = now["data_sources"]
            assert (source["uri"], source["rows"], source["schema"]["id"]) == (uris[1], 600, "int64")
            assert len(source["files_sha256"]) == 64 and source.get("packed") == (
                Path(sources[1]).name if "h5" in sources[1] else None
            )
            with pytest.raises(UserError, match=rf"made from {uris[0]}, and now from {uris[1]}"):
                refuse_changes(saved, now, "step-3")
        assert sources_of(open_dataset({"x": X})) == []

    def test_the_shape_of_fixed_lists_is_known_before_they_are_read(self, bucket, object_store):
        from pyarrow import parquet
        from pyarrow.fs import FileSystem

        store, path = FileSystem.from_uri(f"{bucket}/a.parquet")
        kind = pyarrow.list_(pyarrow.list_(pyarrow.float32(), 3), 2)
        with store.open_output_stream(path) as file:
            parquet.write_table(pyarrow.table({"x": pyarrow.array(X.reshape(500, 2, 3).tolist(), kind)}), file)
        dataset = open_dataset(f"{bucket}/a.parquet")
        before = object_store.reads()
        assert dataset.fields == {"x": Field((2, 3), np.dtype(np.float32))}
        assert np.array_equal(dataset.read(np.arange(500))["x"], X.reshape(500, 2, 3))
        assert object_store.reads() == before + 1

    def test_a_file_of_another_kind_in_a_store(self):
        for name in ("train.csv", "train.h5", "part-*.h5"):
            with pytest.raises(UserError, match="only Parquet files can"):
                open_dataset(f"s3://bucket/{name}")
