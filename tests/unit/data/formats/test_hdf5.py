"""HDF5 files as datasets: the same samples from every layout, and one clear sentence for every file that is none."""

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.hdf5 import BlockArray, Hdf5Dataset
from hpctrain.data.formats.hdf5_arrays import MappedArray
from hpctrain.data.formats.sources import open_dataset
from hpctrain.errors import UserError

LENGTH = 500
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (LENGTH, 5, 7), dtype=np.uint8)
NUMBERS = np.arange(LENGTH)


def write(path: Path, **arrays: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """One file with an array of every layout."""
    path = tmp_path / "mixed.h5"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["plain"] = IMAGES
        file["big_endian"] = NUMBERS.astype(">i8")
        file["flag"] = NUMBERS % 2 == 0
        file["half"] = NUMBERS.astype(np.float16)
        file.create_dataset("group/zipped", data=IMAGES, chunks=(64, 5, 7), compression="gzip", shuffle=True)
        file.create_dataset("split", data=IMAGES, chunks=(33, 2, 7))
        file.create_dataset("unwritten", (LENGTH, 3), np.float32)
    return path


def expected(indices: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "plain": IMAGES[indices],
        "big_endian": indices,
        "flag": indices % 2 == 0,
        "half": indices.astype(np.float16),
        "group/zipped": IMAGES[indices],
        "split": IMAGES[indices],
        "unwritten": np.zeros((len(indices), 3), np.float32),
    }


def test_every_layout_reads_the_same_samples(mixed):
    dataset = open_dataset(mixed)
    assert len(dataset) == LENGTH
    for indices in (
        np.arange(LENGTH),
        RNG.permutation(LENGTH)[:77],
        np.array([3, 3, 499, 0, 3]),
        np.empty(0, np.int64),
    ):
        samples = dataset.read(indices)
        assert samples.keys() == expected(indices).keys()
        for name, values in expected(indices).items():
            assert np.array_equal(samples[name], values), name
            assert samples[name].dtype == dataset.fields[name].dtype
            assert samples[name].dtype.isnative and samples[name].flags.c_contiguous and samples[name].flags.writeable


def test_contiguous_arrays_bypass_the_library(mixed):
    dataset = open_dataset(mixed)
    assert isinstance(dataset, Hdf5Dataset)
    mapped = {name for name, reader in dataset.readers.items() if isinstance(reader, MappedArray)}
    assert mapped == {"plain", "big_endian", "flag", "half"}


def test_a_file_of_contiguous_arrays_is_not_held_open(tmp_path):
    path = write(tmp_path / "a.h5", x=IMAGES)
    dataset = open_dataset(path)
    with h5py.File(path, "r+") as file:
        file["x"][0] = 9
    assert dataset.read(np.array([0]))["x"].max() == 9


def is_in_memory(path: Path, offset: int, num_bytes: int) -> bool:
    """Whether a file's bytes can be read without waiting for the disk; always true on file systems in memory."""
    pages = range(offset // mmap.PAGESIZE, -(-(offset + num_bytes) // mmap.PAGESIZE))
    begin = pages.start * mmap.PAGESIZE
    file = np.memmap(path, np.uint8, "r", begin, (num_bytes + offset - begin,))
    resident = np.zeros(len(pages), np.uint8)
    address, length = ctypes.c_void_p(file.ctypes.data), ctypes.c_size_t(file.nbytes)
    assert ctypes.CDLL(None).mincore(address, length, ctypes.c_void_p(resident.ctypes.data)) == 0
    return bool((resident & 1).all())


def test_samples_that_are_on_disk_are_fetched_all_at_once(tmp_path):
    values = np.arange(64 * 300_000, dtype=np.uint8).reshape(64, 300_000)
    path = write(tmp_path / "a.h5", x=values)
    array = open_dataset(path).readers["x"]
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    assert not array.is_cold

    def drop() -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    drop()
    on_disk = not is_in_memory(path, array.begin + 20 * 300_000, 300_000)
    assert np.array_equal(array.take(np.array([20, 3])), values[[20, 3]])
    assert array.is_cold == on_disk

    drop()
    indices = np.array([50, 7, 31])
    array._fetch(indices)
    places = [array.begin + index * 300_000 for index in indices.tolist()]
    deadline = time.monotonic() + 60
    while not all(is_in_memory(path, place, 300_000) for place in places):
        assert time.monotonic() < deadline, "advice about whole samples did not bring them into memory"
        time.sleep(0.01)
    array.is_cold = True
    assert np.array_equal(array.take(indices), values[indices])
    os.close(descriptor)


def test_fields_are_chosen_and_ordered(mixed):
    dataset = open_dataset(mixed, fields=["split", "flag"])
    assert list(dataset.fields) == ["split", "flag"]
    assert list(dataset.read(np.array([1]))) == ["split", "flag"]


def test_the_order_of_creation_is_kept_where_the_file_keeps_it(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", track_order=True) as file:
        file["x"], file["a"] = NUMBERS, NUMBERS
    assert list(open_dataset(tmp_path / "a.h5").fields) == ["x", "a"]


def test_the_fingerprint_is_of_the_content_not_the_place(tmp_path, mixed):
    plain = write(tmp_path / "elsewhere.h5", plain=IMAGES)
    assert open_dataset(plain).fingerprint() == open_dataset(mixed, ["plain"]).fingerprint()
    changed = IMAGES.copy()
    changed[-1, 0, 0] ^= 1
    assert open_dataset(write(tmp_path / "b.h5", plain=changed)).fingerprint() != open_dataset(plain).fingerprint()


class TestSeveralFiles:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        cuts = [0, 100, 101, 350, LENGTH]
        return [
            write(tmp_path / f"part-{number}.h5", x=IMAGES[begin:end], y=NUMBERS[begin:end])
            for number, (begin, end) in enumerate(itertools.pairwise(cuts))
        ]

    def test_they_are_one_dataset(self, parts):
        for source in (parts, [str(path) for path in parts], str(parts[0].parent / "part-*.h5")):
            dataset = open_dataset(source)
            indices = RNG.permutation(LENGTH)[:200]
            assert np.array_equal(dataset.read(indices)["x"], IMAGES[indices])
            assert np.array_equal(dataset.read(NUMBERS)["y"], NUMBERS)

    def test_the_whole_has_the_fingerprint_of_one_file(self, parts, tmp_path):
        whole = write(tmp_path / "whole.h5", x=IMAGES, y=NUMBERS)
        assert open_dataset(parts).fingerprint() == open_dataset(whole).fingerprint()

    def test_different_fields_are_refused(self, parts, tmp_path):
        other = write(tmp_path / "other.h5", x=IMAGES.astype(np.float32), y=NUMBERS)
        with pytest.raises(
            UserError, match=r"other\.h5 holds x float32\[5, 7\], y int64 but .*part-0\.h5 holds x uint8"
        ):
            open_dataset([parts[0], other])


class TestWrongFiles:
    def refuse(self, source: object, what: str, fix: str = "", **options: object) -> None:
        with pytest.raises(UserError, match=what) as caught:
            open_dataset(source, **options)  # type: ignore[arg-type]
        assert fix in caught.value.fix

    def test_missing(self, tmp_path):
        self.refuse(tmp_path / "no.h5", r"no\.h5 does not exist")
        self.refuse(str(tmp_path / "*.h5"), "no file matches")

    def test_folder(self, tmp_path):
        self.refuse(tmp_path, "is a folder", "*.h5")

    @pytest.mark.parametrize("content", [b"", b"not HDF5", b"\x93NUMPY"])
    def test_not_hdf5(self, tmp_path, content):
        (tmp_path / "a.h5").write_bytes(content)
        self.refuse(tmp_path / "a.h5", "is not an HDF5 file", "hpctrain data pack")

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
    def test_truncated(self, tmp_path, share):
        path = write(tmp_path / "a.h5", x=np.zeros((1000, 100)))
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        self.refuse(path, "truncated", "copy it")

    def test_missing_array(self, mixed):
        self.refuse(mixed, "has no 'image'", "it has big_endian, flag, group/zipped, half, plain", fields=["image"])

    def test_ragged(self, tmp_path):
        path = write(tmp_path / "a.h5", x=np.zeros((5, 2)), y=np.zeros(4))
        self.refuse(path, "different numbers of samples: 'x' 5, 'y' 4")
        assert len(open_dataset(path, ["y"])) == 4

    def test_empty(self, tmp_path):
        self.refuse(write(tmp_path / "a.h5", x=np.zeros((0, 2))), "no samples")
        self.refuse(write(tmp_path / "b.h5"), "no arrays")

    def test_single_value(self, tmp_path):
        self.refuse(write(tmp_path / "a.h5", x=np.float32(3)), "without a sample axis")

    def test_text(self, tmp_path):
        path = tmp_path / "a.h5"
        with h5py.File(path, "w") as file:
            file["names"] = ["a", "b"]
        self.refuse(path, "'names' has dtype object, which is not a number")

    def test_being_written(self, tmp_path):
        path = tmp_path / "a.h5"
        code = "import h5py, sys; f = h5py.File(sys.argv[1], 'w'); f['x'] = [1]; f.flush(); print(flush=True); input()"
        command = [sys.executable, "-c", code, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            assert writer.stdout and writer.stdout.readline()
            self.refuse(path, "cannot be opened", "another process is writing it")
            writer.communicate(b"\n")

    def test_damaged_chunk(self, tmp_path):
        path = tmp_path / "a.h5"
        with h5py.File(path, "w") as file:
            stored = file.create_dataset("x", data=IMAGES, chunks=(64, 5, 7), compression="gzip")
            offset = stored.id.get_chunk_info(3).byte_offset
        with path.open("r+b") as raw:
            raw.seek(offset)
            raw.write(bytes(64))
        with pytest.raises(UserError, match=r"samples \d+ to \d+ of '/x' cannot be read"):
            open_dataset(path).read(np.arange(LENGTH))


class TestBlocks:
    def test_blocks_are_whole_chunks(self, mixed):
        reader = open_dataset(mixed, ["split"]).readers["split"]  # type: ignore[attr-defined]
        assert isinstance(reader, BlockArray)
        assert reader.block_samples % 33 == 0

    def test_each_block_is_read_once_while_there_is_room(self, tmp_path):
        path = tmp_path / "a.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.zeros((640, 1024), np.float64), chunks=(64, 1024))
        reads: list[object] = []

        class Counting(BlockCache):
            def get(self, key, read):  # type: ignore[no-untyped-def]
                return super().get(key, lambda: reads.append(key) or read())

        from hpctrain.data.formats.hdf5 import open_hdf5

        dataset = open_hdf5(path, None, Counting(2**30))
        for _ in range(3):
            dataset.read(RNG.permutation(640))
        assert len(reads) == 10

    @settings(max_examples=50)
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), max_size=40), st.integers(0, 200))
    def test_the_cache_stays_in_its_bound_and_tells_the_truth(self, asked, limit):
        cache = BlockCache(limit)
        for key, size in asked:
            block = cache.get((key, size), lambda key=key, size=size: np.full(size, key, np.uint8))  # type: ignore[misc]
            assert np.array_equal(block, np.full(size, key, np.uint8))
            assert cache.num_bytes == sum(held.nbytes for held in cache.blocks.values())
            assert cache.num_bytes <= limit or len(cache.blocks) == 1
