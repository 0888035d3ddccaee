"""Arrays in other files: read from the file that a link leads to, or refused in one sentence, within seconds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.comm.world import alone
from hpctrain.config import loading
from hpctrain.data.formats import hdf5_resolve
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.hdf5 import Hdf5Dataset, open_hdf5
from hpctrain.data.formats.hdf5_arrays import MappedArray
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


def virtual(path: Path, source: str, endless: bool = False) -> Path:
    """A virtual dataset ``x`` of the one in another file, whose length it takes if it is endless."""
    most = (None,) if endless else None
    whole = slice(0, h5py.h5s.UNLIMITED) if endless else slice(None)
    layout = h5py.VirtualLayout((LENGTH,), np.int64, maxshape=most)
    layout[whole] = h5py.VirtualSource(source, "x", (LENGTH,), maxshape=most)[whole]
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
    return path


def external(path: Path, source: str) -> Path:
    """500 int64 in another file."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (LENGTH,), np.int64, external=[(source, 0, LENGTH * 8)])
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
            return dataclasses.replace(mapped, begin=0)

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


def link_out(path: Path, outside: Path) -> Path:
    return write(path, x=h5py.ExternalLink(str(outside / "secret.h5"), "/x"))


def group_out(path: Path, outside: Path) -> Path:
    return write(path, group=h5py.ExternalLink(str(outside / "secret.h5"), "/"), x=h5py.SoftLink("group/x"))


def symbolic_link_out(path: Path, outside: Path) -> Path:
    (path.parent / "inside.h5").symlink_to(outside / "secret.h5")
    return write(path, x=h5py.ExternalLink("inside.h5", "/x"))


@pytest.mark.parametrize("make", [link_out, group_out, symbolic_link_out])
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


@pytest.mark.parametrize("make", [fifo_itself, fifo_behind_link, fifo_behind_soft_link])
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
    path = write(folder / "a.h5", x=np.zeros((1000, 1000)))
    dataset = open_hdf5(path, None, BlockCache(0))
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(UserError, match="is truncated: it has"):
        dataset.read(np.arange(len(dataset)))


def test_arrays_whose_values_are_in_other_files_are_refused(folder: Path) -> None:
    """The library would read zeros for a file that is missing."""
    write(folder / "b.h5", x=NUMBERS, y=NUMBERS)
    refused(virtual(folder / "a.h5", "b.h5"), "'x' is a virtual dataset, whose values are in other files")
    assert list(everything(folder / "b.h5", fields=["y"])) == ["y"]
    (folder / "raw.bin").write_bytes(NUMBERS.tobytes())
    refused(external(folder / "c.h5", "raw.bin"), "'x' has external storage")


def test_an_array_whose_values_are_in_a_pipe_is_refused_without_opening_it(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    refused(virtual(folder / "a.h5", "pipe", endless=True), "virtual dataset")
    refused(external(folder / "b.h5", "pipe"), "external storage")
