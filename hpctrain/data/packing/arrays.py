"""NumPy files as sources, read as streams, so arrays need not fit into memory. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from hpctrain.data.dataset import Samples, check_field, check_lengths, choose
from hpctrain.data.packing.pack_source import PackSource, block_samples
from hpctrain.errors import UserError

Opener = Callable[[], contextlib.AbstractContextManager[IO[bytes]]]


@dataclass(frozen=True)
class Header:
    """Header of a .npy stream."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]


def from_npz(path: Path, names: tuple[str, ...] | None = None) -> PackSource:
    """A source of the named arrays of a .npz archive, by default all."""
    try:
        with zipfile.ZipFile(path) as archive:
            present = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is not a .npz archive, or is truncated", "save it again with numpy.savez") from error
    chosen = choose(present, names, str(path))
    return from_streams({name: partial(open_member, path, f"{name}.npy") for name in chosen}, str(path))


def from_npy(paths: Sequence[Path]) -> PackSource:
    """A source of one array per .npy file, named after the file."""
    if len({path.stem for path in paths}) < len(paths):
        raise UserError("two .npy files have the same name, and their arrays would too", "rename one of them")
    source = from_streams({path.stem: partial(open_npy, path) for path in paths}, ", ".join(map(str, paths)))
    return replace(source, ordered=list(paths) != sorted(paths))  # the shell sorts what *.npy matches


def open_npy(path: Path) -> IO[bytes]:
    """Open a .npy file."""
    return path.open("rb")


@contextlib.contextmanager
def open_member(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file in an archive."""
    with zipfile.ZipFile(path) as archive, archive.open(name) as member:
        yield member


def from_streams(streams: Mapping[str, Opener], where: str) -> PackSource:
    """A source of one array per stream."""
    headers = {name: read_header(opener, f"{where}: {name!r}") for name, opener in streams.items()}
    fields = {name: check_field(name, header.shape, header.dtype, where) for name, header in headers.items()}
    length = check_lengths({name: header.shape[0] for name, header in headers.items()}, where)
    step = block_samples(fields)

    def blocks() -> Iterator[Samples]:
        with contextlib.ExitStack() as stack:
            parts = {
                name: rows(stack.enter_context(opener()), headers[name], step, f"{where}: {name!r}")
                for name, opener in streams.items()
            }
            for _ in range(0, length, step):
                yield {name: next(part).astype(fields[name].dtype, copy=False) for name, part in parts.items()}

    return PackSource(fields, length, blocks)


def read_header(opener: Opener, what: str) -> Header:
    """Open the stream and read its header."""
    with opener() as stream:
        return parse_header(stream, what)


def parse_header(stream: IO[bytes], what: str) -> Header:
    """Read the header, up to the start of the array's bytes."""
    try:
        version = npy.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the format is for structured arrays")
        return Header(*(npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream))
    except ValueError as error:
        raise UserError(f"{what} is not a NumPy array of numbers: {error}", "save it again with numpy.save") from error


def rows(stream: IO[bytes], header: Header, step: int, what: str) -> Iterator[NDArray[Any]]:
    """The array in blocks of ``step`` rows; an array in Fortran order is read whole."""
    parse_header(stream, what)
    length, *shape = header.shape
    if header.fortran:
        everything = exactly(stream, math.prod(header.shape), header.dtype, what).reshape(header.shape, order="F")
        for begin in range(0, length, step):
            yield everything[begin : begin + step]
        return
    for begin in range(0, length, step):
        count = min(step, length - begin)
        yield exactly(stream, count * math.prod(shape), header.dtype, what).reshape(count, *shape)


def exactly(stream: IO[bytes], count: int, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Read the next ``count`` numbers; raises UserError if the stream is damaged or truncated."""
    try:
        content = stream.read(count * dtype.itemsize)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise UserError(f"{what} is damaged: {error}", "copy it, or make it, again") from error
    if len(content) < count * dtype.itemsize:
        raise UserError(f"{what} is truncated", "copy it, or make it, again")
    return np.frombuffer(content, dtype)
