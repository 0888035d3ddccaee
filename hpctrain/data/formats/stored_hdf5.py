"""HDF5 files in object stores, read where they are: h5py gets a file whose blocks are fetched once, and kept."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import h5py

from hpctrain.data.formats.block_cache import MAPPED_BYTES, BlockCache
from hpctrain.data.formats.disk_cache import DiskCache
from hpctrain.data.formats.hdf5_files import LinkedFiles
from hpctrain.data.formats.tables import checksum
from hpctrain.errors import UserError
from hpctrain.system.files import replacement
from hpctrain.system.object_store import opened, shortened

BLOCK_BYTES = 8 * 2**20
"""That are fetched with one request: a store takes long to begin."""
BLOCKS_AT_ONCE = 8
"""That are fetched if the block before them is here: whoever reads in order needs the next ones, too."""


@dataclass(frozen=True)
class Block:
    """A part of an object."""

    content: memoryview
    nbytes: int
    """What it counts in memory."""


class StoredFile(io.RawIOBase):
    """An object as it is when it is opened, as a file to read: another one in its place is an error."""

    def __init__(self, url: str, cache: BlockCache) -> None:
        self.url = url
        self.cache = cache
        self.disk = DiskCache.of_node()
        self.position = 0
        folder, _, self.name = url.rpartition("/")
        with asking(url):
            self.store = opened(folder)
            found = self.store.head(self.name)
        self.size, self.mark = int(found["size"]), found["e_tag"] or found["last_modified"]
        self.condition = {"if_match" if found["e_tag"] else "if_unmodified_since": self.mark}

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        begin, end = self.position, min(self.position + len(out), self.size)
        if begin < end:
            first = begin // BLOCK_BYTES
            for number, block in enumerate(self._blocks(first, (end - 1) // BLOCK_BYTES + 1), first):
                start = number * BLOCK_BYTES
                part = block.content[max(0, begin - start) : end - start]
                out[self.position - begin : self.position - begin + len(part)] = part
                self.position += len(part)
        return self.position - begin

    def _blocks(self, first: int, end: int) -> list[Block]:
        """Those from ``first`` to ``end`` - 1; several at once from the store."""
        here = [(self.url, each) in self.cache for each in range(first - 1, end)]
        is_in_order = here[0] and not all(here)
        wanted = max(end, min(first + BLOCKS_AT_ONCE, -(-self.size // BLOCK_BYTES))) if is_in_order else end
        if wanted - first == 1:
            return [self._block(first)]
        with ThreadPoolExecutor(BLOCKS_AT_ONCE) as threads:
            return list(threads.map(self._block, range(first, wanted)))[: end - first]

    def _block(self, number: int) -> Block:
        return self.cache.get((self.url, number), lambda: self._read(number))

    def _read(self, number: int) -> Block:
        """From the node's disk, or from the store."""
        begin, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.size)
        fetched: list[bytes] = []

        def write(path: Path) -> None:
            fetched.append(self._fetch(begin, end))
            with replacement(path) as temporary:
                temporary.write_bytes(fetched[0])

        def mapped(path: Path) -> Block:
            with path.open("rb") as file:
                content = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            if len(content) != end - begin:
                raise UserError(f"{path} is damaged", "remove it")
            return Block(content, MAPPED_BYTES)

        if self.disk is not None:
            with contextlib.suppress(OSError):  # memory does without the disk
                return self.disk.get(f"{self.url} {self.mark} {begin} {end}", write, mapped)
        content = fetched[0] if fetched else self._fetch(begin, end)
        return Block(memoryview(content), len(content))

    def _fetch(self, begin: int, end: int) -> bytes:
        with asking(self.url):
            content = bytes(self.store.get(self.name, options={"range": (begin, end), **self.condition}).bytes())
            if len(content) < end - begin:
                raise EOFError(f"the store gave {len(content)} bytes in place of {end - begin}")
            return content


class StoredFiles(LinkedFiles):
    """A data set's file in a store, which leads to no others."""

    def __init__(self, url: str, cache: BlockCache) -> None:
        super().__init__(url)
        self.file = StoredFile(url, cache)
        sum_of_file = checksum([(url, self.file.size, self.file.mark)])
        self.origin = {"kind": "hdf5", "uri": url, "files": 1, "files_sha256": sum_of_file}

    def root(self) -> h5py.File:
        if not self.opened:
            self.opened[Path(self.file.url)] = h5py.File(self.file, "r")
        return next(iter(self.opened.values()))

    def locate(self, owner: h5py.File, name: str, what: str) -> NoReturn:
        raise UserError(
            f"{self.path}: {what} leads to the file {name}, and files in a store can lead to no other",
            "copy its values into the file, or the files to a disk of the cluster",
        )


def files_of(path: Path | str, cache: BlockCache, outside: Sequence[str | Path] = ()) -> LinkedFiles:
    """The file of a path, or of the URL of an object."""
    return StoredFiles(str(path), cache) if "://" in str(path) else LinkedFiles(Path(path), outside)


def matching(url: str) -> list[str]:
    """The objects that a pattern means, in sorted order. Raises UserError if there are none."""
    folder, _, pattern = url.rpartition("/")
    with asking(url):
        names = [str(it["path"]).rpartition("/")[2] for it in opened(folder).list_with_delimiter()["objects"]]
    found = sorted(fnmatch.filter(names, pattern))
    if not found:
        raise UserError(f"no object matches {url}", "correct the pattern of the data")
    return [f"{folder}/{name}" for name in found]


@contextlib.contextmanager
def asking(url: str) -> Iterator[None]:
    """Raises UserError for errors of the store and its library."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{url} does not exist", "correct the address of the data") from error
    except Exception as error:  # also of what gives credentials, whose errors have nothing in common
        from obstore.exceptions import PreconditionError

        if isinstance(error, PreconditionError):
            raise UserError(
                f"{url} has changed since the run opened it", "leave data alone while it is read"
            ) from error
        raise UserError(
            f"{url} cannot be read: {shortened(error)}",
            "check the address, the connection to the store, and the credentials that its library uses",
        ) from error
