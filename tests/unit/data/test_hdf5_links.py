"""Arrays that lie in other files: read from the file that owns them, or refused in one sentence, within seconds."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.comm.world import alone
from hpctrain.config import loading
from hpctrain.data.formats import hdf5_resolve
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.hdf5 import Hdf5Dataset, open_hdf5
from hpctrain.data.formats.hdf5_arrays import MappedArray, MappedBytes
from hpctrain.data.formats.hdf5_files import LinkedFiles
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData
from hpctrain.data.samples import Recipe
from hpctrain.errors import UserError
from hpctrain.rank.problem import make_problem

pytestmark = pytest.mark.timeout(60, method="thread")  # the library does not let signals interrupt it

LENGTH = 500
NUMBERS = np.arange(LENGTH)
SAMPLES = NUMBERS[:, None] * 10 + np.arange(6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data set's own folder."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside it, with a file of HDF5 and one of bare bytes."""
    (tmp_path / "outside").mkdir()
    write(tmp_path / "outside" / "secret.h5", x=NUMBERS)
    (tmp_path / "outside" / "raw.bin").write_bytes(NUMBERS.tobytes())
    return tmp_path / "outside"


def write(path: Path, **items: Any) -> Path:
    """Arrays and links."""
    with h5py.File(path, "w") as file:
        for name, item in items.items():
            file[name] = item
    return path


def virtual(path: Path, shape: tuple[int, ...], *mappings: tuple[Any, str, Any], **options: Any) -> Path:
    """A virtual dataset ``x``; each mapping is what is covered, the name of a file, and its selected ``x``."""
    layout = h5py.VirtualLayout(shape, options.pop("dtype", np.int64), **options)
    for where, name, (source_shape, selection) in mappings:
        layout[where] = h5py.VirtualSource(name, "x", source_shape)[selection]
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-7)
    return path


def external(path: Path, *parts: tuple[str, int, int]) -> Path:
    """500 int64 in other files."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (LENGTH,), np.int64, external=parts)
    return path


def everything(path: Path, **options: Any) -> dict[str, Any]:
    dataset = open_dataset(path, **options)
    return dataset.read(np.arange(len(dataset)))


def refused(path: Path, *words: str, **options: Any) -> UserError:
    """What opening the file says; ``data info`` and ``data pack`` refuse it, too."""
    with pytest.raises(UserError) as caught:
        open_dataset(path, **options)
    for word in words:
        assert word in caught.value.what
    assert main(["data", "info", str(path), "--seconds", "0.01"]) == 64
    assert main(["data", "pack", str(path), "-o", str(path.with_name("packed.h5")), "--compression", "gzip"]) == 64
    assert not path.with_name("packed.h5").exists()
    return caught.value


class TestLinks:
    def test_arrays_are_mapped_in_the_file_that_owns_them(self, folder: Path) -> None:
        with h5py.File(folder / "other.h5", "w") as file:
            file["group/x"] = NUMBERS + 1000
        path = write(
            folder / "a.h5",
            large=np.zeros(10 * LENGTH)[:LENGTH],
            far=h5py.ExternalLink("other.h5", "/group"),
            x=h5py.SoftLink("/far/x"),
            direct=h5py.ExternalLink("other.h5", "group/x"),
        )
        dataset = open_dataset(path)
        assert isinstance(dataset, Hdf5Dataset) and set(dataset.fields) == {"large", "x", "direct"}
        assert all(isinstance(reader, MappedArray) for reader in dataset.readers.values())
        for name in ("x", "direct"):
            assert np.array_equal(dataset.read(NUMBERS)[name], NUMBERS + 1000)
        assert np.array_equal(everything(path, fields=["far/x"])["far/x"], NUMBERS + 1000)
        assert main(["data", "pack", str(path), "-o", str(folder / "packed.h5")]) == 0
        assert np.array_equal(everything(folder / "packed.h5")["x"], NUMBERS + 1000)

    def test_the_library_decides_where_the_map_differs(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        right = hdf5_resolve.map_dataset

        def wrong(files: Any, dataset: Any) -> MappedArray:
            mapped = right(files, dataset)
            assert mapped is not None
            end = mapped.where.end
            return MappedArray(MappedBytes(folder, mapped.where.mapping, 0, end), mapped.shape, mapped.dtype)

        monkeypatch.setattr(hdf5_resolve, "map_dataset", wrong)
        for values in (NUMBERS + 1, SAMPLES + 1):
            assert np.array_equal(everything(write(folder / "a.h5", x=values))["x"], values)

    def test_a_file_that_is_replaced_while_it_is_opened(self, folder: Path) -> None:
        path = write(folder / "a.h5", x=NUMBERS)
        with LinkedFiles(path) as files:
            dataset = files.root()["x"]
            write(folder / "b.h5", pad=np.zeros(99), x=NUMBERS).replace(path)
            with pytest.raises(UserError, match="was replaced while it was opened"):
                hdf5_resolve.map_dataset(files, dataset)

    def test_a_link_to_nothing(self, folder: Path) -> None:
        write(folder / "b.h5", y=NUMBERS)
        refused(write(folder / "a.h5", x=h5py.SoftLink("/y")), "the link 'x' leads to /y", "does not exist")
        refused(write(folder / "a.h5", x=h5py.ExternalLink("b.h5", "x")), "b.h5", "does not exist")
        refused(write(folder / "a.h5", x=h5py.ExternalLink("c.h5", "x")), "c.h5", "does not exist")
        path = write(folder / "a.h5", x=h5py.SoftLink("/y"), z=NUMBERS)
        assert list(everything(path, fields=["z"])) == ["z"]

    def test_circles(self, folder: Path) -> None:
        refused(write(folder / "a.h5", x=h5py.SoftLink("/y"), y=h5py.SoftLink("x")), "circle")
        write(folder / "b.h5", x=h5py.ExternalLink("a.h5", "/x"))
        refused(write(folder / "a.h5", x=h5py.ExternalLink("b.h5", "/x")), "circle")
        with h5py.File(folder / "a.h5", "w") as file:
            file["group/x"] = NUMBERS
            file["group/again"] = file["group"]
        refused(folder / "a.h5", "'group/again' contains itself")
        assert np.array_equal(everything(folder / "a.h5", fields=["group/x"])["group/x"], NUMBERS)

    def test_a_file_with_too_many_names(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hpctrain.data.formats.hdf5_files.MOST_NAMES", 5)
        path = write(folder / "a.h5", **{f"x{number}": NUMBERS for number in range(6)})
        refused(path, "more than 5 names")
        assert list(everything(path, fields=["x3"])) == ["x3"]


class TestVirtual:
    def test_a_missing_source(self, folder: Path) -> None:
        halves = [(slice(0, 250), "b.h5", ((250,), slice(None))), (slice(250, 500), "c.h5", ((250,), slice(None)))]
        path = virtual(folder / "a.h5", (LENGTH,), *halves)
        write(folder / "b.h5", x=NUMBERS[:250])
        refused(path, "a source of 'x' leads to", "c.h5, which does not exist")
        write(folder / "c.h5", y=NUMBERS[250:])
        refused(path, "'x' of c.h5", "does not exist")
        write(folder / "c.h5", x=NUMBERS[250:400])
        refused(path, "more than it has")
        write(folder / "c.h5", x=NUMBERS[250:])
        assert np.array_equal(everything(path)["x"], NUMBERS)

    def test_samples_without_a_source(self, folder: Path) -> None:
        write(folder / "b.h5", x=NUMBERS)
        refused(virtual(folder / "a.h5", (600,), (slice(0, 500), "b.h5", ((500,), slice(None)))), "no source for some")
        twice = [(slice(0, 300), "b.h5", ((500,), slice(0, 300))), (slice(200, 500), "b.h5", ((500,), slice(200, 500)))]
        refused(virtual(folder / "a.h5", (500,), *twice), "several sources")

    def test_a_hole_that_counting_does_not_show(self, folder: Path) -> None:
        write(folder / "b.h5", x=SAMPLES)
        sides = [
            ((slice(0, 300), part), "b.h5", ((500, 6), (slice(0, 300), part))) for part in (slice(0, 3), slice(3, 6))
        ]
        with pytest.raises(UserError, match="no source is named for sample 300"):
            everything(virtual(folder / "a.h5", (500, 6), *sides))

    def test_a_source_that_goes_away_later_is_still_read(self, folder: Path) -> None:
        chunked = folder / "c.h5"
        with h5py.File(chunked, "w") as file:
            file.create_dataset("x", data=NUMBERS[250:], chunks=(10,))
        write(folder / "b.h5", x=NUMBERS[:250])
        halves = [(slice(0, 250), "b.h5", ((250,), slice(None))), (slice(250, 500), "c.h5", ((250,), slice(None)))]
        dataset = open_dataset(virtual(folder / "a.h5", (LENGTH,), *halves))
        chunked.unlink()
        (folder / "b.h5").unlink()
        assert np.array_equal(dataset.read(NUMBERS)["x"], NUMBERS)

    def test_more_sources_than_the_process_may_open(self, folder: Path) -> None:
        for number in range(50):
            write(folder / f"{number}.h5", x=NUMBERS[number * 10 : number * 10 + 10])
        parts = [(slice(n * 10, n * 10 + 10), f"{n}.h5", ((10,), slice(None))) for n in range(50)]
        path = virtual(folder / "a.h5", (LENGTH,), *parts)
        assert np.array_equal(everything(path)["x"], NUMBERS)
        program = "import sys; from hpctrain.cli import main; sys.exit(main(['data', 'info', sys.argv[1]]))"
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)),
        )
        assert done.returncode == 64 and "ulimit -n" in done.stderr, done.stderr

    def test_what_cannot_be_put_together_is_refused(self, folder: Path) -> None:
        write(folder / "b.h5", x=NUMBERS)
        write(folder / "c.h5", x=SAMPLES)
        corners = (slice(None), "c.h5", ((500, 6), (slice(0, 4), [0, 2, 5])))
        refused(virtual(folder / "a.h5", (4, 3), corners), "not of whole rows")
        refused(
            virtual(folder / "a.h5", (500,), (slice(None), "b.h5", ((500,), slice(None))), dtype=np.int32),
            "values of int64 as int32",
        )
        with h5py.File(folder / "a.h5", "w") as file:
            space = h5py.h5s.create_simple((500,), (h5py.h5s.UNLIMITED,))
            space.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (10,), (10,))
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.VIRTUAL)
            properties.set_virtual(space, b"part-%b.h5", b"x", h5py.h5s.create_simple((10,)))
            whole = h5py.h5s.create_simple((500,), (h5py.h5s.UNLIMITED,))
            h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT64, whole, properties)
        refused(folder / "a.h5", "an endless series of sources")

    def test_circles(self, folder: Path) -> None:
        refused(virtual(folder / "a.h5", (500,), (slice(None), ".", ((500,), slice(None)))), "a source of itself")
        virtual(folder / "a.h5", (500,), (slice(None), "b.h5", ((500,), slice(None))))
        refused(virtual(folder / "b.h5", (500,), (slice(None), "a.h5", ((500,), slice(None)))), "a source of itself")

    def test_one_that_grows_with_its_source(self, folder: Path) -> None:
        endless = slice(0, h5py.h5s.UNLIMITED)
        with h5py.File(folder / "b.h5", "w") as file:
            file.create_dataset("x", data=NUMBERS, maxshape=(None,), chunks=(64,))
        with h5py.File(folder / "a.h5", "w") as file:
            layout = h5py.VirtualLayout((100,), np.int64, maxshape=(None,))
            layout[endless] = h5py.VirtualSource("b.h5", "x", (500,), maxshape=(None,))[endless]
            file.create_virtual_dataset("x", layout)
        assert np.array_equal(everything(folder / "a.h5")["x"], NUMBERS)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_it_reads_what_the_library_reads(self, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
        """Rows together, interleaved, picked, in parts, stacked; of other byte order, compressed, virtual."""
        folder = tmp_path_factory.mktemp("virtual")
        with h5py.File(folder / "plain.h5", "w") as file:
            file["x"] = SAMPLES.astype(">i4")
        with h5py.File(folder / "zipped.h5", "w") as file:
            file.create_dataset("x", data=SAMPLES + 1, chunks=(7, 4), compression="gzip")
        virtual(folder / "nested.h5", SAMPLES.shape, (slice(None), "plain.h5", (SAMPLES.shape, slice(None))))
        mappings: list[tuple[Any, str, Any]] = []
        row = 0
        for _ in range(data.draw(st.integers(1, 4))):
            name = data.draw(st.sampled_from(["plain.h5", "zipped.h5", "nested.h5"]))
            count, step, start = (data.draw(st.integers(1, most)) for most in (20, 9, 99))
            rows = slice(start, start + step * (count - 1) + 1, step)
            kind = data.draw(st.sampled_from(["rows", "picked", "interleaved", "sides", "stacked"]))
            if kind == "rows":
                mappings.append((slice(row, row + count), name, (SAMPLES.shape, rows)))
            elif kind == "picked":
                places, picked = (sorted(data.draw(st.sets(st.integers(0, 30), min_size=5, max_size=5))) for _ in "ab")
                mappings.append(([row + place for place in places], name, (SAMPLES.shape, picked)))
                rest = [row + place for place in range(31) if place not in places]
                mappings.append((rest, "plain.h5", (SAMPLES.shape, slice(0, 26))))
                count = 31
            elif kind == "interleaved":
                mappings.append((slice(row, row + 2 * count, 2), name, (SAMPLES.shape, rows)))
                mappings.append((slice(row + 1, row + 2 * count, 2), "plain.h5", (SAMPLES.shape, rows)))
                count *= 2
            elif kind == "sides":  # columns 2 and 3 are left to the fill value
                for columns, others in ((slice(0, 2), slice(4, 6)), (slice(4, 6), slice(0, 4, 2))):
                    mappings.append(((slice(row, row + count), columns), name, (SAMPLES.shape, (rows, others))))
            else:
                count = 1
                mappings.append((row, name, (SAMPLES.shape, start)))
            row += count
        path = virtual(folder / "a.h5", (row, 6), *mappings)
        with h5py.File(path) as file:
            expected = file["x"][:]
        assert np.array_equal(everything(path)["x"], expected)
        shuffled = np.random.default_rng(row).permutation(row)
        assert np.array_equal(open_dataset(path).read(shuffled)["x"], expected[shuffled])


class TestExternalStorage:
    def test_it_is_mapped(self, folder: Path) -> None:
        (folder / "raw.bin").write_bytes(bytes(16) + NUMBERS.tobytes())
        dataset = open_dataset(external(folder / "a.h5", ("raw.bin", 16, LENGTH * 8)))
        assert isinstance(dataset, Hdf5Dataset) and isinstance(dataset.readers["x"], MappedArray)
        assert np.array_equal(dataset.read(NUMBERS)["x"], NUMBERS)

    def test_several_files_are_refused(self, folder: Path) -> None:
        for number, content in enumerate((NUMBERS[:100], NUMBERS[100:])):
            (folder / f"{number}.bin").write_bytes(content.tobytes())
        path = external(folder / "a.h5", ("0.bin", 0, 800), ("1.bin", 0, 3200))
        refused(path, "'x' is in 2 external files, not in one")

    def test_a_file_that_is_missing_or_short(self, folder: Path) -> None:
        path = external(folder / "a.h5", ("raw.bin", 0, LENGTH * 8))
        refused(path, "the external storage of 'x' leads to", "does not exist")
        (folder / "raw.bin").write_bytes(NUMBERS.tobytes()[:-1])
        refused(path, "has 3999 bytes in place of 4000")


def link_out(path: Path, outside: Path) -> Path:
    return write(path, x=h5py.ExternalLink(str(outside / "secret.h5"), "/x"))


def group_out(path: Path, outside: Path) -> Path:
    return write(path, group=h5py.ExternalLink(str(outside / "secret.h5"), "/"), x=h5py.SoftLink("group/x"))


def source_out(path: Path, outside: Path) -> Path:
    return virtual(path, (LENGTH,), (slice(None), "../outside/secret.h5", ((LENGTH,), slice(None))))


def storage_out(path: Path, outside: Path) -> Path:
    return external(path, (str(outside / "raw.bin"), 0, LENGTH * 8))


def symbolic_link_out(path: Path, outside: Path) -> Path:
    (path.parent / "inside.h5").symlink_to(outside / "secret.h5")
    return write(path, x=h5py.ExternalLink("inside.h5", "/x"))


@pytest.mark.parametrize("make", [link_out, group_out, source_out, storage_out, symbolic_link_out])
class TestOutside:
    def test_it_is_refused_unless_it_is_named(self, folder: Path, outside: Path, make: Callable[..., Path]) -> None:
        path = make(folder / "a.h5", outside)
        error = refused(path, str(outside), "outside the data set's own folder")
        assert str(outside) in error.fix
        assert np.array_equal(everything(path, allow_outside=[outside])["x"], NUMBERS)
        words = ["--allow-outside", str(outside)]
        assert main(["data", "info", str(path), "--seconds", "0.01", *words]) == 0
        assert main(["data", "pack", str(path), "-o", str(folder / "packed.h5"), *words]) == 0
        assert np.array_equal(everything(folder / "packed.h5")["x"], NUMBERS)

    @pytest.mark.slow
    def test_the_run_file_takes_the_line_of_the_message(
        self, folder: Path, outside: Path, make: Callable[..., Path]
    ) -> None:
        path = make(folder / "a.h5", outside)
        (folder / "task.py").write_text(
            "import torch\nfrom hpctrain.tasks.definition import TorchTask\n\n"
            "def task(world):\n"
            "    model = torch.nn.Linear(1, 1)\n"
            "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
            "    loss = lambda outputs, batch: outputs.mean()\n"
            f"    return TorchTask(model, loss, optimizer, {str(path)!r}, validation={str(path)!r})\n"
        )
        run_file = folder / "run.yaml"
        text = f"name: a\ntask: {folder}/task.py:task\ntrain: {{steps: 1, global_batch: 2}}\n"
        run_file.write_text(text)
        with pytest.raises(UserError, match="outside the data set's own folder") as caught:
            make_problem(loading.load(run_file), alone())
        run_file.write_text(text + "data:\n  " + caught.value.fix.split("`")[1] + "\n")
        problem = make_problem(loading.load(run_file), alone())
        assert problem.validation is not None
        order = Order(LENGTH, LENGTH, shuffle="none")
        data = TrainingData(problem.train, order, 0, 1, workers=1, recipe=Recipe(unchanged))
        try:
            assert np.array_equal(next(data.starting_at(0, 0)).micro_batches[0]["x"], NUMBERS)
        finally:
            data.close()


def unchanged(sample: Any, rng: Any) -> Any:
    return sample


def test_beside_a_file_is_also_beside_what_it_is_a_symbolic_link_to(folder: Path, outside: Path) -> None:
    write(outside / "real.h5", x=h5py.ExternalLink("secret.h5", "/x"))
    (folder / "a.h5").symlink_to(outside / "real.h5")
    assert np.array_equal(everything(folder / "a.h5")["x"], NUMBERS)


def fifo_itself(path: Path, fifo: str) -> None:
    path.symlink_to(fifo)


def fifo_behind_link(path: Path, fifo: str) -> None:
    write(path, x=h5py.ExternalLink(fifo, "/x"))


def fifo_behind_soft_link(path: Path, fifo: str) -> None:
    write(path, y=NUMBERS, group=h5py.ExternalLink(fifo, "/"), x=h5py.SoftLink("group/x"))


def fifo_as_source(path: Path, fifo: str) -> None:
    virtual(path, (LENGTH,), (slice(None), fifo, ((LENGTH,), slice(None))))


def fifo_as_endless_source(path: Path, fifo: str) -> None:
    endless = slice(0, h5py.h5s.UNLIMITED)
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((100,), np.int64, maxshape=(None,))
        layout[endless] = h5py.VirtualSource(fifo, "x", (500,), maxshape=(None,))[endless]
        file.create_virtual_dataset("x", layout)


def fifo_as_storage(path: Path, fifo: str) -> None:
    external(path, (fifo, 0, LENGTH * 8))


@pytest.mark.parametrize(
    "make",
    [fifo_itself, fifo_behind_link, fifo_behind_soft_link, fifo_as_source, fifo_as_endless_source, fifo_as_storage],
)
def test_nobody_waits_for_a_pipe(folder: Path, make: Callable[..., None]) -> None:
    os.mkfifo(folder / "pipe")
    make(folder / "a.h5", "pipe")
    refused(folder / "a.h5", "is not a plain file but a pipe")


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv", ".parquet"])
def test_pack_waits_for_no_pipe(folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / f"a{suffix}")
    assert main(["data", "pack", str(folder / f"a{suffix}"), "-o", str(folder / "a.h5")]) == 64
    assert "is not a plain file but a pipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2**40,), {"chunks": (2**20,)}), ((2**40,), {}), ((10, 2**40), {"chunks": (1, 2**20)}), ((2**40, 3), {})],
)
def test_samples_that_were_never_written(folder: Path, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", shape, np.uint8, **options)
    refused(folder / "a.h5", f"'x' claims {shape[0]} samples, but of its", "at most 0 were ever written")


def test_a_virtual_array_claims_no_more_than_its_sources(folder: Path) -> None:
    with h5py.File(folder / "b.h5", "w") as file:
        file.create_dataset("x", (2**40,), np.uint8, chunks=(2**20,))
    path = virtual(folder / "a.h5", (2**40,), (slice(None), "b.h5", ((2**40,), slice(None))), dtype=np.uint8)
    refused(path, "claims 1099511627776 samples")
    path = virtual(folder / "a.h5", (2**40,), (slice(0, 5), "b.h5", ((2**40,), slice(0, 5))), dtype=np.uint8)
    with h5py.File(folder / "b.h5", "w") as file:
        file.create_dataset("x", (2**20,), np.uint8, chunks=(2**20,))
    refused(path, "no source for some of its 1099511627776 samples")


def test_an_order_that_does_not_fit_into_memory() -> None:
    with pytest.raises(UserError, match="the order of 1125899906842624 samples does not fit"):
        Order(2**50, 2, shuffle="block").batch_indices(0, 0)


def test_samples_that_do_not_fit_into_memory(folder: Path) -> None:
    dataset = open_dataset(write(folder / "a.h5", x=SAMPLES))
    many = np.broadcast_to(np.int64(3), (2**50,))
    with pytest.raises(UserError, match=r"1125899906842624 samples of 4\.8e-05 MB do not fit into memory"):
        dataset.read(many)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_file_that_is_cut_short_while_it_is_read(folder: Path, share: float) -> None:
    """Touching the lost pages of a map would kill the process."""
    values = np.zeros((1000, 1000))
    for path in (write(folder / "a.h5", x=values), external(folder / "b.h5", ("raw.bin", 0, LENGTH * 8))):
        if path.name == "b.h5":
            (folder / "raw.bin").write_bytes(NUMBERS.tobytes())
        dataset = open_hdf5(path, None, BlockCache(0))
        victim = path if path.name == "a.h5" else folder / "raw.bin"
        os.truncate(victim, int(victim.stat().st_size * share))
        with pytest.raises(UserError, match=f"{victim.name} is truncated: it has"):
            dataset.read(np.arange(len(dataset)))
