"""Compares reading samples from a packed file and from an object store: ``python -m benchmarks.reading``.

The same rows are in a packed HDF5 file, and on a local S3 server as Parquet, tar shards (read by WebDataset) and
MosaicML shards (``pip install webdataset mosaicml-streaming``). The first epoch is cold: neither pages of the files nor
blocks of the store are cached on the node.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from benchmarks.program import start
from hpctrain.bench.ranks import on_ranks
from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text
from hpctrain.system.object_store import opened
from tests.support.object_store import serving

WIDTH, GROUP, SHARD, FILE = 192, 10_000, 10_000, 100_000
"""Values per row, rows per row group, samples per tar shard, rows per Parquet file."""
PEERS = {"webdataset": "webdataset", "streaming": "streaming"}
"""Contenders that need a package, with its module."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2_621_440, help="of 776 bytes each (default: 2621440, 2 GB)")
    parser.add_argument(
        "--only", nargs="+", choices=list(FILLING), metavar="KIND", help=f"of {', '.join(FILLING)} (default: all)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    parser.add_argument("--epochs", type=int, default=3, help="the first of which is cold (default: 3)")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="folder of the packed file, and of caches of other libraries"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def rows_of(begin: int, end: int) -> dict[str, NDArray[np.float32] | NDArray[np.int64]]:
    """Makes a range of rows, reproducibly."""
    rng = np.random.default_rng(begin)
    return {"x": rng.random((end - begin, WIDTH), np.float32), "y": np.arange(begin, end)}


def parts(begin: int, end: int, rows: int) -> Iterator[tuple[int, int]]:
    """Splits a range into ranges of at most ``rows`` rows."""
    return ((at, min(at + rows, end)) for at in range(begin, end, rows))


def fill_packed(num_rows: int, folder: Path) -> str:
    path = folder / "packed.h5"
    pack(path, 0, num_rows)
    with open(path, "rb") as file:  # drop it from the page cache
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return str(path)


def pack(path: Path, first: int, last: int) -> None:
    """Writes a file as ``hpctrain data pack`` does."""
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (last - first, WIDTH), np.float32)
        file.create_dataset("y", data=np.arange(first, last))
        for begin, end in parts(first, last, GROUP):
            x[begin - first : end - first] = rows_of(begin, end)["x"]


def fill_table(num_rows: int, folder: Path) -> str:
    import pyarrow
    from pyarrow import parquet
    from pyarrow.fs import FileSystem

    system, path = FileSystem.from_uri("s3://rows/table")
    schema = pyarrow.schema({"x": pyarrow.list_(pyarrow.float32(), WIDTH), "y": pyarrow.int64()})
    for number, (first, last) in enumerate(parts(0, num_rows, FILE)):
        with (
            system.open_output_stream(f"{path}/{number:05d}.parquet") as file,
            parquet.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for begin, end in parts(first, last, GROUP):
                some = rows_of(begin, end)
                x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(some["x"].ravel()), WIDTH)
                writer.write_table(pyarrow.table({"x": x, "y": some["y"]}, schema), row_group_size=GROUP)
    return "s3://rows/table"


def fill_webdataset(num_rows: int, folder: Path) -> str:
    store = opened("s3://rows/shards")
    for begin, end in parts(0, num_rows, SHARD):
        content, some = io.BytesIO(), rows_of(begin, end)
        with tarfile.open(fileobj=content, mode="w") as tar:
            for x, y in zip(some["x"], some["y"], strict=True):
                info = tarfile.TarInfo(f"{y:09d}.bin")
                info.size = x.nbytes + 8
                tar.addfile(info, io.BytesIO(x.tobytes() + int(y).to_bytes(8, "little")))
        store.put(f"{begin // SHARD:05d}.tar", content.getvalue())
    shards = -(-num_rows // SHARD)
    return f"{os.environ['AWS_ENDPOINT_URL']}/rows/shards/{{00000..{shards - 1:05d}}}.tar"


def fill_streaming(num_rows: int, folder: Path) -> str:
    streaming: Any = importlib.import_module("streaming")
    columns = {"x": f"ndarray:float32:{WIDTH}", "y": "int64"}
    with streaming.MDSWriter(out=(str(folder / "mds"), "s3://rows/mds"), columns=columns) as writer:
        for begin, end in parts(0, num_rows, GROUP):
            some = rows_of(begin, end)
            for x, y in zip(some["x"], some["y"], strict=True):
                writer.write({"x": x, "y": y})
    return "s3://rows/mds"


FILLING: dict[str, Callable[[int, Path], str]] = {
    "packed": fill_packed,
    "table": fill_table,
    "streaming": fill_streaming,
    "webdataset": fill_webdataset,
}
"""Functions that write the rows and return their address, by contender."""


def run(args: argparse.Namespace) -> int:
    found = []
    names = args.only or [name for name in FILLING if name not in PEERS or importlib.util.find_spec(PEERS[name])]
    with serving() as store, tempfile.TemporaryDirectory(dir=args.folder) as folder:
        os.environ.update(store.environment, S3_ENDPOINT_URL=store.url)
        store.make_bucket("rows")
        store.publish("rows")  # WebDataset reads it with curl
        for name in names:
            address = FILLING[name](args.rows, Path(folder))
            os.environ["READING_CACHE"] = f"{folder}/cache-{name}"
            options = {"--kind": name, "--address": address, "--epochs": str(args.epochs), "--rows": str(args.rows)}
            (row,) = on_ranks("benchmarks.reading_ranks", options, args.ranks)
            found.append(row)
            if not args.json:
                rates = " ".join(f"{rate:>10,.0f}" for rate in row["samples_per_s"])
                memory = " ".join(f"{size / 2**20:>6.0f}" for size in row["uss_bytes"])
                foreign_text.show(f"{name:<12} samples/s by epoch {rates}   MiB of a rank {memory}")
    if args.json:
        foreign_text.show(json.dumps({"rows": found}))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(start("reading", "samples a second from a packed file, a table in a store, and tars", add_arguments, run))
