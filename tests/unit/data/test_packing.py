"""Packing: what goes in comes out, the file appears whole or not at all, and bad sources end in one sentence."""

import csv
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.data.dataset import Field
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.formats.tables import open_table
from hpctrain.data.packing import pack_source as source_module
from hpctrain.data.packing.pack_source import PackSource, from_dataset, packed_notes
from hpctrain.data.packing.table import from_table
from hpctrain.data.packing.write import write_hdf5
from hpctrain.errors import UserError

ROOT = Path(__file__).parents[3]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 4, 3)).astype(np.float32)
Y = np.arange(300)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that all sources come in several blocks."""
    monkeypatch.setattr(source_module, "BLOCK_BYTES", 5000)
    monkeypatch.setattr("hpctrain.data.formats.tables.BATCH_ROWS", 64)
    monkeypatch.chdir(tmp_path)


def pack(*words: object) -> None:
    assert main(["data", "pack", *map(str, words)]) == 0


def read(path: str) -> dict[str, np.ndarray]:
    dataset = open_dataset(path)
    return dataset.read(np.arange(len(dataset)))


def layouts(path: str) -> set[str]:
    return {reader.layout for reader in open_dataset(path).readers.values()}  # type: ignore[attr-defined]


class TestNumpy:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_archives(self, save):  # type: ignore[no-untyped-def]
        save("a.npz", x=X, y=Y.astype(">i4"), fortran=np.asfortranarray(X), scalar=3)
        pack("a.npz", "-o", "a.h5", "--field", "x", "--field", "y", "--field", "fortran")
        samples = read("a.h5")
        assert list(samples) == ["x", "y", "fortran"]
        assert np.array_equal(samples["x"], X) and np.array_equal(samples["fortran"], X)
        assert np.array_equal(samples["y"], Y) and samples["y"].dtype == np.int32
        assert layouts("a.h5") == {"contiguous"}

    def test_archives_one_after_the_other(self):
        np.savez("a.npz", x=X[:10], y=Y[:10])
        np.savez("b.npz", x=X[10:], y=Y[10:])
        pack("a.npz", "b.npz", "-o", "c.h5")
        assert np.array_equal(read("c.h5")["x"], X) and np.array_equal(read("c.h5")["y"], Y)

    def test_single_arrays_are_named_as_their_files(self):
        np.save("image.npy", np.asfortranarray(X))
        np.save("label.npy", Y.astype(">i4"))
        pack("image.npy", "label.npy", "-o", "a.h5")
        assert list(read("a.h5")) == ["image", "label"]
        assert np.array_equal(read("a.h5")["image"], X)

    def test_objects_are_not_unpickled(self, refused):
        class Bomb:
            def __reduce__(self):
                return Path("exploded").touch, ()

        np.savez("a.npz", x=np.array([Bomb()], dtype=object))
        assert "Object arrays cannot be loaded" in refused("a.npz")
        assert not Path("exploded").exists()

    def test_damage(self, refused):
        np.save("a.npy", X)
        Path("a.npy").write_bytes(Path("a.npy").read_bytes()[:-100])
        assert "a.npy is truncated, damaged, or" in refused("a.npy")
        np.savez("a.npz", x=X)
        content = bytearray(Path("a.npz").read_bytes())
        content[5000] ^= 1
        Path("b.npz").write_bytes(content)
        assert "b.npz is truncated, damaged, or" in refused("b.npz")
        Path("c.npz").write_bytes(content[:4000])
        assert "c.npz is truncated, damaged, or" in refused("c.npz")
        Path("d.npy").write_text("text")
        said = refused("d.npy")
        assert "d.npy is truncated, damaged, or" in said and "unsafe" not in said  # NumPy's advice is to unpickle it

    def test_ragged(self, refused):
        np.savez("a.npz", x=X, y=Y[1:])
        assert "'x' 300, 'y' 299" in refused("a.npz")


class TestCsv:
    @pytest.fixture(autouse=True)
    def _table(self) -> None:
        with open("a.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "height", "age", "label"])
            writer.writerows([y, y / 2, y % 90, y % 3] for y in Y.tolist())

    def test_each_column_is_an_array(self):
        pack("a.csv", "-o", "a.h5")
        samples = read("a.h5")
        assert list(samples) == ["id", "height", "age", "label"]
        assert samples["height"].dtype == np.float64 and samples["age"].dtype == np.int64
        assert np.array_equal(samples["height"], Y / 2)

    def test_columns_make_arrays(self):
        pack("a.csv", "-o", "a.h5", "--field", "y=label", "--field", "x=*", "--dtype", "float32", "--dtype", "y=uint8")
        samples = read("a.h5")
        assert list(samples) == ["y", "x"]
        assert samples["x"].dtype == np.float32 and samples["y"].dtype == np.uint8
        assert np.array_equal(samples["x"], np.stack([Y, Y / 2, Y % 90], axis=1).astype(np.float32))

    def test_a_column_is_float_where_any_value_is(self):
        Path("b.csv").write_text("a\n" + "1\n" * 200 + "2.5\n")
        pack("b.csv", "-o", "b.h5")
        assert read("b.h5")["a"].tolist() == [1.0] * 200 + [2.5]

    def test_whole_numbers_stay_so(self):
        Path("b.csv").write_text('\ufeffa , b,note\n+1,1e3,"two\nlines"\n\n 9223372036854775807 ,-inf,\n', "utf-8")
        pack("b.csv", "-o", "b.h5", "--columns", "a,b")
        assert read("b.h5")["a"].tolist() == [1, 2**63 - 1] and read("b.h5")["a"].dtype == np.int64
        assert read("b.h5")["b"].tolist() == [1000.0, -np.inf]

    @pytest.mark.parametrize("name", ["b.tsv", "b.TSV"])
    def test_tabs(self, name):
        Path(name).write_text("a\tb\n1\t2\n")
        pack(name, "-o", "b.h5")
        assert {name: values.tolist() for name, values in read("b.h5").items()} == {"a": [1], "b": [2]}

    @pytest.mark.parametrize(
        ("content", "what"),
        [
            ("a,b\n1,2\n3,\n", "b.csv: column 'b' has '' in row 1, which is not a number"),
            ("a\n1\n9007199254740993\n0.5\n", "column 'a' has 9007199254740993 in row 1, which float64 would round"),
            ("a\n12345678901234567890123\n", "column 'a' has 12345678901234567890123 in row 0, which float64"),
            ("a\n" + "1\n" * 200 + "0x10\n", "column 'a' has '0x10' in row 200, which is not a number"),
            ("a,b\n1,2\n3\n", "b.csv is not CSV, or is damaged: CSV parse error: Row #3: Expected 2 columns, got 1: 3"),
            ('a,b\n1,"2\n3,4\n', "column 'b' has '2\\n3,4' in row 0"),
            ("1,2\n3,4\n", "has no header line"),
            ("a,a\n3,4\n", "multiple columns named a"),
            ("a, a\n3,4\n", "two columns of the same name"),
            ("a,b\n", "holds no rows"),
            ("", "Empty CSV file"),
            ("größe\n1\n", "is not text in UTF-8"),
            ("a\n1\ngröße\n", "is not text in UTF-8"),
        ],
    )
    def test_bad_tables(self, content, what, refused):
        Path("b.csv").write_text(content, encoding="latin1")
        assert what in refused("b.csv")

    @pytest.mark.parametrize("output", ["b.csv", "link.csv"])
    def test_nothing_is_packed_into_itself(self, output, refused):
        """``--force`` replaced the source."""
        Path("b.csv").write_text("a\n1\n")
        Path("link.csv").symlink_to("b.csv")
        assert "is both source and output" in refused("b.csv", "-o", output, "--force")
        assert Path("b.csv").read_text() == "a\n1\n"

    def test_values_must_fit_their_dtype(self, refused):
        said = refused("a.csv", "--dtype", "id=uint8")
        assert "'id' of sample 256 holds 256, which uint8 cannot hold" in said
        assert "'height' of sample 1 holds 0.5" in refused("a.csv", "--dtype", "height=int32")

    def test_unknown_columns(self, refused):
        assert "no column 'weight'" in refused("a.csv", "--field", "x=weight")


class TestImages:
    @pytest.fixture(autouse=True)
    def _pillow(self) -> None:
        pytest.importorskip("PIL")

    def save(self, path: str, pixels: np.ndarray) -> None:
        from PIL import Image

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)

    def test_a_folder_for_each_class(self):
        pixels = RNG.integers(0, 256, (12, 16, 24, 3), dtype=np.uint8)
        for number, image in enumerate(pixels):
            self.save(f"images/{'dog' if number < 6 else 'cat'}/{number:02}.png", image)
        Path("images/cat/notes.txt").write_text("not an image")
        pack("images", "-o", "a.h5")
        samples = read("a.h5")
        assert np.array_equal(samples["image"], np.concatenate([pixels[6:], pixels[:6]]))
        assert samples["label"].tolist() == [0] * 6 + [1] * 6
        with h5py.File("a.h5") as file:
            assert json.loads(file.attrs["hpctrain"]) == {"classes": ["cat", "dog"]}

    def test_a_flat_folder_scaled(self):
        for size in (8, 9):
            self.save(f"images/{size}.png", np.full((size, size), 7, np.uint8))
        pack("images", "-o", "a.h5", "--size", "4x6")
        assert read("a.h5")["image"].shape == (2, 4, 6, 1)
        assert (read("a.h5")["image"] == 7).all()

    def test_bad_folders(self, refused):
        Path("images").mkdir()
        assert "holds no images" in refused("images")
        self.save("images/a.png", np.zeros((8, 8), np.uint8))
        self.save("images/b.png", np.zeros((8, 9), np.uint8))
        assert "images/b.png is 8x9 pixels but the first image is 8x8" in refused("images")
        self.save("images/b.png", RNG.integers(0, 256, (8, 8), dtype=np.uint8))
        Path("images/b.png").write_bytes(Path("images/b.png").read_bytes()[:70])
        assert "images/b.png is not an image, or is damaged" in refused("images")


class TestParquet:
    @pytest.fixture(autouse=True)
    def _pyarrow(self) -> None:
        pytest.importorskip("pyarrow")

    def save(self, **columns: object) -> None:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), "a.parquet")

    def test_numbers_and_lists(self):
        self.save(x=X.tolist(), y=Y, z=Y / 2, flag=Y % 2 == 0)
        pack("a.parquet", "-o", "a.h5", "--dtype", "x=float32")
        samples = read("a.h5")
        assert np.array_equal(samples["x"], X) and np.array_equal(samples["y"], Y)
        assert samples["flag"].dtype == np.bool_
        pack("a.parquet", "-o", "b.h5", "--field", "both=y,z")
        assert np.array_equal(read("b.h5")["both"], np.stack([Y, Y / 2], axis=1))

    @pytest.mark.parametrize(
        ("column", "what"),
        [
            ([1, None], "column 'x' has no value in row 1"),
            ([[1], [1, 2]], "column 'x' has lists of 1 to 2 values"),
            (["a", "b"], "'x' has dtype object"),
        ],
    )
    def test_bad_columns(self, column, what, refused):
        self.save(x=column)
        assert what in refused("a.parquet")

    @pytest.mark.parametrize("options", [[], ["--compression", "gzip"]])
    def test_lists_of_another_length_further_on(self, options, refused):
        self.save(x=[[1, 2, 3]] * 64 + [[1]] * 64)
        said = refused("a.parquet", *options)
        assert "'x' has shape (1,) from sample 64 on, and (3,) before it" in said

    def test_damage(self, refused):
        self.save(x=Y)
        whole = Path("a.parquet").read_bytes()
        for content in (b"PAR1", whole[:-9], whole[:40] + bytes(400) + whole[440:]):
            Path("a.parquet").write_bytes(content)
            assert "or is damaged" in refused("a.parquet")


class TestFolders:
    """Of tables, which Arrow reads."""

    @pytest.fixture(autouse=True)
    def _pyarrow(self) -> None:
        pytest.importorskip("pyarrow")

    def save(self, kind: str) -> None:
        """Y and its half in four files, one of them without rows, in a folder for each day."""
        import pyarrow
        from pyarrow import csv, orc, parquet

        for day, rows in enumerate(np.split(Y, [100, 100, 250])):
            folder = Path(f"table/day={day}")
            folder.mkdir(parents=True)
            table = pyarrow.table({"y": rows, "half": rows / 2})
            if kind == "json":
                (folder / "a.json").write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
            elif kind == "csv":
                csv.write_csv(table, folder / "a.csv")
            elif kind == "orc":
                orc.write_table(table, folder / "a.orc")
            else:
                parquet.write_table(table, folder / "a.parquet", row_group_size=70)

    @pytest.mark.parametrize("kind", ["parquet", "orc", "csv", "json"])
    def test_rows_of_all_files_in_order(self, kind):
        self.save(kind)
        pack("table", "--kind", kind, "-o", "a.h5", "--columns", "half,y")
        samples = read("a.h5")
        assert list(samples) == ["half", "y"] and samples["y"].dtype == np.int64
        assert np.array_equal(samples["y"], Y) and np.array_equal(samples["half"], Y / 2)

    def test_columns_of_different_shapes_do_not_make_an_array(self, refused):
        Path("a.json").write_text('{"x": [1, 2], "y": 3}\n')
        said = refused("a.json", "--kind", "json", "--field", "v=x,y")
        assert "array 'v' is made of columns x, y, whose shapes differ" in said

    def test_lists_of_files_of_which_one_has_no_rows(self):
        import pyarrow
        from pyarrow import orc

        Path("table").mkdir()
        for name, rows in {"a": X[:100], "b": X[:0], "c": X[100:]}.items():
            lists = pyarrow.array(rows.reshape(-1, 12).tolist(), pyarrow.list_(pyarrow.float64()))
            orc.write_table(pyarrow.table({"x": lists}), f"table/{name}.orc")
        pack("table", "--kind", "orc", "-o", "a.h5")
        assert np.array_equal(read("a.h5")["x"], X.reshape(-1, 12))

    def test_what_was_read_stands_in_the_file(self):
        self.save("parquet")
        pack("table", "--kind", "parquet", "-o", "a.h5")
        (source,) = packed_notes("a.h5")["sources"]
        checksum = source.pop("files_sha256")
        assert source == {
            "kind": "parquet",
            "uri": "table",
            "files": 4,
            "rows": 300,
            "schema": {"y": "int64", "half": "double", "day": "int32"},
        }
        Path("table").rename("moved")
        pack("moved", "--kind", "parquet", "-o", "b.h5", "--columns", "y")
        assert packed_notes("b.h5")["sources"][0]["files_sha256"] == checksum
        Path("moved/day=1").rename("moved/day=9")
        pack("moved", "--kind", "parquet", "-o", "c.h5", "--columns", "y")
        assert packed_notes("c.h5")["sources"][0]["files_sha256"] != checksum

    def test_the_files_of_a_versioned_table_are_refused(self, refused):
        self.save("parquet")
        Path("table/_delta_log").mkdir()
        assert "is a Delta table" in refused("table", "--kind", "parquet")

    def test_a_table_that_changes_is_told(self):
        self.save("parquet")
        source = from_table(open_table("table", "parquet"), None)
        Path("table/day=2/a.parquet").write_bytes(Path("table/day=0/a.parquet").read_bytes())
        with pytest.raises(UserError, match=r"a\.parquet has changed since the run opened it"):
            list(source.blocks())


class TestWriting:
    @pytest.mark.parametrize(
        "options", [["--chunks", "7"], ["--compression", "gzip"], ["--compression", "lzf", "--chunks", "64"]]
    )
    def test_chunks_and_back(self, options):
        np.savez("a.npz", x=X, y=Y)
        pack("a.npz", "-o", "a.h5", *options)
        assert all(layout.startswith("chunks") for layout in layouts("a.h5"))
        pack("a.h5", "-o", "b.h5")
        assert layouts("b.h5") == {"contiguous"}
        assert np.array_equal(read("b.h5")["x"], X)
        assert open_dataset("a.h5").fingerprint() == open_dataset("b.h5").fingerprint()

    @pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64"])
    def test_all_kinds_of_numbers(self, dtype):
        values = (RNG.random((50, 3)) * 100).astype(dtype)
        for options in ({}, {"chunk_samples": 4}):
            write_hdf5("a.h5", from_dataset(open_dataset({"x": values})), overwrite=True, **options)
            assert np.array_equal(read("a.h5")["x"], values) and read("a.h5")["x"].dtype == dtype

    def test_the_same_input_makes_the_same_bytes(self):
        np.savez("a.npz", x=X, y=Y)
        pack("a.npz", "-o", "a.h5")
        pack("a.npz", "-o", "b.h5")
        assert Path("a.h5").read_bytes() == Path("b.h5").read_bytes()

    def test_a_file_is_replaced_only_where_asked(self, refused):
        np.savez("a.npz", x=X, y=Y)
        Path("a.h5").write_text("precious")
        assert "a.h5 exists" in refused("a.npz", "-o", "a.h5")
        assert Path("a.h5").read_text() == "precious"
        pack("a.npz", "-o", "a.h5", "--force")
        assert len(open_dataset("a.h5")) == 300

    @pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
    def test_a_failure_leaves_nothing(self, options):
        def blocks():
            yield {"x": X[:10]}
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.raises(UserError, match="No space left on device"):
            write_hdf5(Path("a.h5"), PackSource({"x": Field((4, 3), X.dtype)}, 300, blocks), **options)
        assert list(Path().iterdir()) == []

    @pytest.mark.parametrize("samples", [0, 20, 40])
    def test_a_pack_that_is_killed_leaves_no_file_of_that_name(self, samples):
        """Before it has written any, some, or all of its 40 samples."""
        program = f"""
import os, signal
import numpy as np
from hpctrain.data.dataset import Field
from hpctrain.data.packing.pack_source import PackSource
from hpctrain.data.packing.write import write_hdf5

def blocks():
    for begin in range(0, 40, 10):
        if begin == {samples}:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {{"x": np.arange(begin, begin + 10)}}
    os.kill(os.getpid(), signal.SIGKILL)

write_hdf5("a.h5", PackSource({{"x": Field((), np.dtype(np.int64))}}, 40, blocks))
"""
        done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
        assert done.returncode == -signal.SIGKILL and not Path("a.h5").exists()
        write_hdf5("a.h5", from_dataset(open_dataset({"x": np.arange(40)})))
        assert read("a.h5")["x"].tolist() == list(range(40))

    def test_a_full_disk_is_told(self):
        """A limit on the size of files stands for the end of the disk."""
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        big = open_dataset({"x": RNG.integers(0, 2**62, (1000, 1000))})
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        try:
            for options in ({}, {"compression": "gzip"}):
                with pytest.raises(UserError, match="cannot be written"):
                    write_hdf5(Path("a.h5"), from_dataset(big), **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert list(Path().iterdir()) == []

    def test_too_large_for_the_disk_is_told_before_work(self):
        def blocks():
            raise AssertionError("the source was read")

        with pytest.raises(UserError, match="GB free and the file needs"):
            write_hdf5(Path("a.h5"), PackSource({"x": Field((10**9,), X.dtype)}, 10**9, blocks))

    def test_a_source_that_gives_less_is_told(self):
        with pytest.raises(UserError, match="gave 10 samples in place of 300"):
            write_hdf5(Path("a.h5"), PackSource({"x": Field((4, 3), X.dtype)}, 300, lambda: iter([{"x": X[:10]}])))

    def test_json(self, capsys):
        np.savez("a.npz", x=X, y=Y)
        pack("a.npz", "-o", "a.h5", "--json")
        made = json.loads(capsys.readouterr().out)
        assert made["samples"] == 300 and made["fields"][0] == {"name": "x", "dtype": "float32", "shape": [4, 3]}

    @pytest.mark.parametrize(
        ("words", "what"),
        [
            (["no.npz", "-o", "b.h5"], "no.npz does not exist"),
            (["a.npz", "a.h5", "-o", "b.h5"], "several kinds"),
            (["a.odd", "-o", "b.h5"], "has an unknown suffix"),
            (["a.npz", "-o", "b.h5", "--size", "4x4"], "for images"),
            (["a.npz", "-o", "b.h5", "--size", "big"], "not a size"),
            (["a.npz", "-o", "b.h5", "--chunks", "0"], "--chunks: give 1 or more in place of 0"),
            (["a.npz", "-o", "b.h5", "--dtype", "floaty"], "is not a dtype"),
            (["a.npz", "-o", "b.h5", "--dtype", "z=int8"], "there is no array 'z'"),
            (["a.npz", "-o", "b.h5", "--dtype", "object"], "not a number"),
            (["a.npz", "-o", "b.h5", "--field", "z=x,y"], "holds arrays"),
            (["a.npz", "-o", "b.h5", "--field", "x="], "names no columns"),
        ],
    )
    def test_bad_words(self, words, what, refused):
        np.savez("a.npz", x=X, y=Y)
        Path("a.odd").touch()
        Path("a.h5").touch()
        assert what in refused(*words)


class TestInfo:
    def test_json(self, capsys):
        write_hdf5(Path("a.h5"), from_dataset(open_dataset({"x": X, "y": Y})))
        assert main(["data", "info", "a.h5", "--json", "--seconds", "0.01"]) == 0
        about = json.loads(capsys.readouterr().out)
        assert about["samples"] == 300 and about["bytes_per_sample"] == 56 and about["hints"] == []
        assert about["fields"][1] == {"name": "y", "dtype": "int64", "shape": [], "layout": "contiguous"}
        assert about["fingerprint"] == open_dataset("a.h5").fingerprint()
        assert about["random"]["samples_per_s"] > 0 and about["sequential"]["bytes_per_s"] > 0

    def test_table(self, capsys):
        dataset = open_dataset({"x": X, "y": Y})
        for name in ("a", "b"):
            write_hdf5(Path(f"{name}.h5"), from_dataset(dataset), compression="gzip")
        assert main(["data", "info", "*.h5", "--seconds", "0.01"]) == 0
        shown = capsys.readouterr().out
        for part in ("600 in 2 files, 56 bytes each", "4 x 3", "gzip", "hint: ", "samples/s"):
            assert part in shown


def test_complex_numbers_are_stored_as_real_ones_only_where_nothing_is_lost(tmp_path):
    real = {"z": np.dtype(np.float32)}
    write_hdf5(tmp_path / "real.h5", from_dataset(open_dataset({"z": np.array([1 + 0j, 2 + 0j])})), real)
    assert open_dataset(tmp_path / "real.h5").read(np.arange(2))["z"].tolist() == [1.0, 2.0]
    with pytest.raises(UserError, match="'z' of sample 1 holds"):
        write_hdf5(tmp_path / "complex.h5", from_dataset(open_dataset({"z": np.array([1 + 0j, 2 + 1j])})), real)


def test_an_image_of_16_bits_is_not_cut_off(refused):
    image = pytest.importorskip("PIL.Image")
    Path("images").mkdir()
    image.fromarray(np.full((8, 8), 4000, np.uint16)).save("images/a.png")
    assert "images/a.png has values from 4000 to 4000" in refused("images")
    image.fromarray(np.full((8, 8), 40, np.uint16)).save("images/a.png")
    pack("images", "-o", "a.h5")
    assert (read("a.h5")["image"] == 40).all()


@pytest.mark.parametrize("header", [",x", "x,.", "a,a/b", "/a,b"])
def test_a_column_that_hdf5_cannot_name_is_refused(header, refused):
    Path("a.csv").write_text(f"{header}\n1,2\n")
    assert "cannot be named" in refused("a.csv")
    Path("a.csv").write_text(",kg/m2\n1,2\n")
    pack("a.csv", "-o", "a.h5", "--field", "x=kg/m2")


@pytest.mark.parametrize("name", ["a.csv/b.h5", f"{'b' * 300}.h5"])
def test_a_place_that_cannot_be_is_refused(name, refused):
    Path("a.csv").write_text("x,y\n1,2\n")
    assert "cannot be written" in refused("a.csv", "-o", name)
