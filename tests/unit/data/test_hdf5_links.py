"""Arrays behind links, and in other files: read, or refused in one sentence, within seconds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.data.formats import hdf5_resolve
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.hdf5 import Hdf5Dataset, open_hdf5
from hpctrain.data.formats.hdf5_arrays import MappedArray
from hpctrain.data.formats.hdf5_files import Hdf5File
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.errors import UserError

pytestmark = pytest.mark.timeout(60, method="thread")  # the library does not let signals interrupt it

LENGTH = 500
NUMBERS = np.arange(LENGTH)
SAMPLES = NUMBERS[:, None] * 10 + np.arange(6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data set's own folder."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


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
    def test_arrays_behind_soft_links(self, folder):
        path = write(folder / "a.h5", x=h5py.SoftLink("/far/x"), far=h5py.SoftLink("group"), **{"group/x": NUMBERS})
        dataset = open_dataset(path)
        assert isinstance(dataset, Hdf5Dataset) and set(dataset.fields) == {"x", "group/x"}
        assert all(isinstance(reader, MappedArray) for reader in dataset.readers.values())
        assert np.array_equal(dataset.read(NUMBERS)["x"], NUMBERS)
        assert np.array_equal(everything(path, fields=["far/x"])["far/x"], NUMBERS)
        assert main(["data", "pack", str(path), "-o", str(folder / "packed.h5")]) == 0
        assert np.array_equal(everything(folder / "packed.h5")["x"], NUMBERS)

    def test_the_library_decides_where_the_map_differs(self, folder, monkeypatch):
        right = hdf5_resolve.map_dataset

        def wrong(files, dataset):
            mapped = right(files, dataset)
            assert mapped is not None
            return dataclasses.replace(mapped, begin=0)

        monkeypatch.setattr(hdf5_resolve, "map_dataset", wrong)
        for values in (NUMBERS + 1, SAMPLES + 1):
            assert np.array_equal(everything(write(folder / "a.h5", x=values))["x"], values)

    def test_a_file_that_is_replaced_while_it_is_opened(self, folder):
        path = write(folder / "a.h5", x=NUMBERS)
        with Hdf5File(path) as file:
            dataset = file.root["x"]
            write(folder / "b.h5", pad=np.zeros(99), x=NUMBERS).replace(path)
            with pytest.raises(UserError, match="was replaced while it was opened"):
                hdf5_resolve.map_dataset(file, dataset)

    def test_a_link_to_nothing(self, folder):
        refused(write(folder / "a.h5", x=h5py.SoftLink("/y")), "the link 'x' leads to /y", "does not exist")
        path = write(folder / "a.h5", x=h5py.SoftLink("/y"), z=NUMBERS)
        assert list(everything(path, fields=["z"])) == ["z"]

    def test_circles(self, folder):
        refused(write(folder / "a.h5", x=h5py.SoftLink("/y"), y=h5py.SoftLink("x")), "circle")
        with h5py.File(folder / "a.h5", "w") as file:
            file["group/x"] = NUMBERS
            file["group/again"] = file["group"]
        refused(folder / "a.h5", "'group/again' contains itself")
        assert np.array_equal(everything(folder / "a.h5", fields=["group/x"])["group/x"], NUMBERS)

    def test_a_file_with_too_many_names(self, folder, monkeypatch):
        monkeypatch.setattr("hpctrain.data.formats.hdf5_files.MOST_NAMES", 5)
        path = write(folder / "a.h5", **{f"x{number}": NUMBERS for number in range(6)})
        refused(path, "more than 5 names")
        assert list(everything(path, fields=["x3"])) == ["x3"]


@pytest.mark.parametrize("target", ["other.h5", "missing.h5", "pipe"])
def test_links_to_other_files_are_refused_without_opening_them(folder, target):
    os.mkfifo(folder / "pipe")
    write(folder / "other.h5", x=NUMBERS)
    path = write(folder / "a.h5", y=NUMBERS, group=h5py.ExternalLink(target, "/"), x=h5py.SoftLink("group/x"))
    refused(path, f"'group' is a link to another file, {target}")
    with pytest.raises(UserError, match=f"'x' is a link to another file, {target}"):
        open_dataset(path, fields=["x"])
    assert list(everything(path, fields=["y"])) == ["y"]


def test_nobody_waits_for_a_pipe(folder):
    os.mkfifo(folder / "pipe")
    (folder / "a.h5").symlink_to("pipe")
    refused(folder / "a.h5", "is not a plain file but a pipe")


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv", ".parquet"])
def test_pack_waits_for_no_pipe(folder, suffix, cli):
    os.mkfifo(folder / f"a{suffix}")
    assert (
        "is not a plain file but a pipe"
        in cli("data", "pack", folder / f"a{suffix}", "-o", folder / "a.h5", code=64).err
    )


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2**40,), {"chunks": (2**20,)}), ((2**40,), {}), ((10, 2**40), {"chunks": (1, 2**20)}), ((2**40, 3), {})],
)
def test_samples_that_were_never_written(folder, shape, options):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", shape, np.uint8, **options)
    refused(folder / "a.h5", f"'x' claims {shape[0]} samples, but of its", "at most 0 were ever written")


def test_an_order_that_does_not_fit_into_memory():
    with pytest.raises(UserError, match="the order of 1125899906842624 samples does not fit"):
        Order(2**50, 2, shuffle="block").batch_indices(0, 0)


def test_samples_that_do_not_fit_into_memory(folder):
    dataset = open_dataset(write(folder / "a.h5", x=SAMPLES))
    many = np.broadcast_to(np.int64(3), (2**50,))
    with pytest.raises(UserError, match=r"1125899906842624 samples of 4\.8e-05 MB do not fit into memory"):
        dataset.read(many)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_file_that_is_cut_short_while_it_is_read(folder, share):
    """Touching the lost pages of a map would kill the process."""
    path = write(folder / "a.h5", x=np.zeros((1000, 1000)))
    dataset = open_hdf5(path, None, BlockCache(0))
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(UserError, match="is truncated: it has"):
        dataset.read(np.arange(len(dataset)))


def test_arrays_whose_values_are_in_other_files_are_refused(folder):
    """The library would read zeros for a file that is missing."""
    write(folder / "b.h5", x=NUMBERS, y=NUMBERS)
    refused(virtual(folder / "a.h5", "b.h5"), "'x' is a virtual dataset, whose values are in other files")
    assert list(everything(folder / "b.h5", fields=["y"])) == ["y"]
    (folder / "raw.bin").write_bytes(NUMBERS.tobytes())
    refused(external(folder / "c.h5", "raw.bin"), "'x' has external storage")


def test_an_array_whose_values_are_in_a_pipe_is_refused_without_opening_it(folder):
    os.mkfifo(folder / "pipe")
    refused(virtual(folder / "a.h5", "pipe", endless=True), "virtual dataset")
    refused(external(folder / "b.h5", "pipe"), "external storage")
