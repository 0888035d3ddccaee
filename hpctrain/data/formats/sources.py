"""Opens any supported data source as a Dataset; several files are concatenated."""

from __future__ import annotations

import fnmatch
import functools
import glob
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np

from hpctrain.config.values import refuse_credentials
from hpctrain.data.dataset import (
    Dataset,
    Field,
    Samples,
    SeededDataset,
    choose,
    content_fingerprint,
    from_arrays,
    is_ordered,
)
from hpctrain.data.formats.away import retry_local, retry_store
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.records import JsonLines, Records, TarShard, open_records
from hpctrain.data.formats.table_dataset import open_table_dataset
from hpctrain.data.formats.tables import open_table
from hpctrain.data.samples import grouped, require_alike
from hpctrain.errors import UserError, file_errors, is_away
from hpctrain.system.array_types import Ints

T = TypeVar("T")
CACHE_BYTES = 256 * 2**20


def open_dataset(
    source: Any,
    fields: Sequence[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    ragged: bool = False,
    decode: Any = None,
) -> Dataset:
    """Open data of any supported kind.

    Args:
        source: the path of a file: HDF5, or, by suffix, ``.jsonl``, ``.tar`` or ``.parquet``; several files of one
            kind, which are concatenated (a pattern such as ``"data/*.h5"``, in sorted order, or a list); a folder of
            Parquet files, or its URI (``s3://bucket/folder``); a dict of arrays; a map-style Dataset of torch or
            Hugging Face; a finite tf.data.Dataset of single samples (read into memory); a Dataset, which is returned as
            it is; or a callable without arguments (a function, partial or class) that returns one of these, which
            worker processes call again.
        fields: arrays to use, in this order; by default all. Names the parts if samples are tuples.
        cache_bytes: memory for cached blocks of chunked or compressed arrays, for all files together.
        ragged: whether samples of a torch or tf.data Dataset, or of files other than HDF5, may differ in shape. Set for
            the data of tasks with ``collate``.
        decode: decode(record) turns a record of a file other than HDF5 into a sample, a dict or tuple of arrays. The
            record is a JSON object, a sample's files in a tar by extension (bytes; ``__key__`` is their common name),
            or a row of a Parquet table. For HDF5 ``"netcdf"``: values mean what the attributes ``scale_factor``,
            ``add_offset``, ``_Unsigned``, ``_FillValue`` and ``missing_value`` say; missing ones become NaN.

    Raises:
        UserError: the source is missing, damaged or empty, or holds data that cannot be trained on.
    """
    names = None if fields is None else tuple(fields)
    if inspect.isroutine(source) or isinstance(source, (type, functools.partial)):
        how: dict[str, Any] = {"fields": names, "cache_bytes": cache_bytes, "ragged": ragged, "decode": decode}
        dataset = open_dataset(source(), **how)
        return (CalledSeededDataset if isinstance(dataset, SeededDataset) else CalledDataset)(dataset, source, how)
    if isinstance(source, Dataset):
        return source
    if isinstance(source, (str, Path)):
        return open_files(expand([source]), names, BlockCache(cache_bytes), ragged, decode)
    if isinstance(source, Mapping):
        chosen = choose(list(source), names, "the dict of arrays")
        return from_arrays({name: source[name] for name in chosen})
    if comes_from(source, "torch") or comes_from(source, "datasets"):
        from hpctrain.data.formats import torch_dataset

        return torch_dataset.adapted(source, names, ragged)
    if comes_from(source, "tensorflow"):
        from hpctrain.data.formats import tf_dataset

        return tf_dataset.adapted(source, names, ragged)
    if isinstance(source, Sequence) and source and all(isinstance(item, (str, Path)) for item in source):
        return open_files(expand(source), names, BlockCache(cache_bytes), ragged, decode)
    raise UserError(
        f"data of type {type(source).__name__} cannot be opened",
        "give paths, a dict of NumPy arrays, a torch Dataset, a tf.data.Dataset, an hpctrain.Dataset, or a "
        "function that returns one; a generator runs only once: make arrays of it, or give hpctrain.open_stream an "
        "object whose __iter__ starts it",
    )


@dataclass(frozen=True, eq=False)
class CalledDataset:
    """A dataset returned by a function, which worker processes can call again."""

    dataset: Dataset
    function: Callable[[], Any]
    how: Mapping[str, Any]
    """The other arguments of ``open_dataset``."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The dataset's fields."""
        return self.dataset.fields

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Ints) -> Samples:
        return self.dataset.read(indices)

    def fingerprint(self) -> str:
        return self.dataset.fingerprint()


class CalledSeededDataset(CalledDataset):
    """A dataset returned by a function that may draw from global random generators."""

    dataset: SeededDataset

    def read_seeded(self, indices: Ints, seeds: Ints) -> Samples:
        return self.dataset.read_seeded(indices, seeds)


RECORDS: Mapping[str, Callable[[Path], Records]] = {"JSON lines": JsonLines, "tar": TarShard}
"""Classes that read files of records, by kind."""
KINDS = {".jsonl": "JSON lines", ".ndjson": "JSON lines", ".tar": "tar", ".parquet": "Parquet"}
"""Kinds by suffix; HDF5 is the default."""
NETCDF = "netcdf"
HDF5 = (".h5", ".hdf5")
"""Suffixes of HDF5 files in file:// addresses."""


def open_files(
    paths: Sequence[str | Path],
    names: tuple[str, ...] | None,
    cache: BlockCache,
    ragged: bool = False,
    decode: Any = None,
) -> Dataset:
    """Open and concatenate files or tables of one kind."""
    kind, *others = {kind_of(path) for path in paths}
    if others:
        suffixes = sorted({Path(path).suffix.lower() for path in paths})
        raise UserError(f"files of several kinds are given as one: {', '.join(suffixes)}", "give one kind")
    if isinstance(decode, str) and (decode, kind) != (NETCDF, "HDF5"):
        raise UserError(f"decode={decode!r} is given for {paths[0]}", "give a function, or for HDF5 'netcdf'")
    if callable(decode) and kind == "HDF5":
        raise UserError(f"{paths[0]} is read as HDF5, whose arrays no function decodes", "leave decode out")

    def open_one(path: str | Path) -> Dataset:
        if kind == "Parquet":
            return open_table_dataset(open_table(str(path), "parquet"), names, cache, ragged, decode)
        if kind in RECORDS:
            return open_records(retry_store(lambda: RECORDS[kind](Path(path))), decode, names, ragged)
        from hpctrain.data.formats.hdf5 import open_hdf5

        return retry_store(lambda: open_hdf5(Path(path), names, cache, decode))

    return concatenate([open_one(path) for path in paths], [str(path) for path in paths])


def kind_of(source: str | Path) -> str:
    """The kind of a file, of a folder of Parquet files, or of a URI; raises UserError for others in a store."""
    text = str(source)
    suffix = Path(text).suffix.lower()
    if "://" in text and suffix not in ("", ".parquet"):
        fix = "copy it to a disk of the cluster, or store its samples as Parquet"
        raise UserError(f"{text} cannot be read directly from the store: only Parquet files can", fix)
    tables = partial(Path(text).expanduser().glob, "**/*.parquet")
    if "://" in text or looked_up(text, lambda: any(tables())):
        return "Parquet"
    return KINDS.get(suffix, "HDF5")


def expand(sources: Iterable[str | Path]) -> list[str | Path]:
    """The files that match the paths or patterns, and the addresses of tables."""
    return [path for each in sources for path in looked_up(str(each), partial(files_of, each))]


def looked_up(where: str, call: Callable[[], T]) -> T:
    """Calls ``call``, which looks at folders; raises UserError if this user may not."""
    with file_errors(f"{where} cannot be read", "correct the path of the data, or ask its owner for permission"):
        return retry_local(where, call)


def files_of(pattern: str | Path) -> list[str | Path]:
    """The files that match a path or pattern, or the address of a table. Raises OSError."""
    refuse_credentials(pattern, "the address of the data")
    text = str(pattern)
    if text.startswith("file://") and Path(text).suffix.lower() in HDF5:
        pattern = Path(unquote(text.removeprefix("file://")))
    if isinstance(pattern, str) and "://" in pattern:
        return [pattern]
    path = Path(pattern).expanduser()
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    folder = Path(path.anchor)
    if found := set(matching(folder, path.relative_to(folder).parts)):
        return sorted(found, key=str)
    raise UserError(f"no file matches {path}", "correct the pattern of the data, as seen from the compute nodes")


def matching(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """What matches a pattern in a folder, as glob.glob, which silently leaves out a folder whose server is away.

    Raises OSError.
    """
    if not parts:
        yield folder
        return
    first, *rest = parts
    names = [first]
    try:
        if glob.has_magic(first):
            names = os.listdir(folder)
        elif not rest:
            os.lstat(folder / first)
    except OSError as error:
        if is_away(error):
            raise
        if isinstance(error, NotADirectoryError) and first == "**" and not rest:
            yield folder
        return
    if first == "**":
        yield from matching(folder, rest)
    for name in names if first == "**" else fnmatch.filter(names, first):
        if first.startswith(".") or not name.startswith("."):
            yield from matching(folder / name, parts if first == "**" else rest)


def comes_from(source: Any, package: str) -> bool:
    """Whether the object's class derives from a class of this package, which is not imported."""
    return any(base.__module__.partition(".")[0] == package for base in type(source).__mro__)


def decode_of(dataset: Any) -> Any:
    """What decodes the dataset's records or arrays; see ``open_dataset``."""
    return getattr(dataset, "decode", None)


class ConcatDataset:
    """The concatenated samples of several datasets. Create it with ``concatenate``, which checks them."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self.parts = parts
        self.fields: Mapping[str, Field] = parts[0].fields
        self.ordered = is_ordered(parts[0])
        self.decode = decode_of(parts[0])
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, indices: Ints) -> Samples:
        samples = {name: field.make_rows(len(indices)) for name, field in self.fields.items()}
        for index, rows in grouped(np.searchsorted(self.ends, indices, side="right")):
            part = self.parts[index]
            for name, values in part.read(indices[rows] - (self.ends[index] - len(part))).items():
                samples[name][rows] = values
        return samples

    def fingerprint(self) -> str:
        return content_fingerprint(self)


def concatenate(parts: Sequence[Dataset], names: Sequence[str]) -> Dataset:
    """Join the parts into one dataset; ``names`` identify them in errors. Raises UserError if their fields differ."""
    fix = "give files with the same arrays, shapes and dtypes, or name only arrays that they share"
    require_alike([part.fields for part in parts], names, fix)
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)
