"""Samples read from a packed file and from an object store, in turn: ``python -m benchmarks.reading``.

The same rows lie in a packed HDF5 file, and in a local S3 server as Parquet and as tar shards, which WebDataset reads
(``pip install webdataset``). The first epoch is cold: no page of the files and no block of the store is on the node.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.program import start
from hpctrain.bench.ranks import on_ranks
from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text
from tests.support.object_store import ObjectStore, serving

WIDTH, GROUP, SHARD = 192, 10_000, 10_000
"""Values of a row, rows of a row group, samples of a tar shard."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=400_000, help="of 776 bytes each (default: 400000)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    parser.add_argument("--epochs", type=int, default=3, help="the first of which is cold (default: 3)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the packed file and caches lie")
    parser.add_argument("--json", action="store_true", help="print JSON")


def rows_of(begin: int, end: int) -> dict[str, NDArray[np.float32] | NDArray[np.int64]]:
    """The same at each call."""
    rng = np.random.default_rng(begin)
    return {"x": rng.normal(size=(end - begin, WIDTH)).astype(np.float32), "y": np.arange(begin, end)}


def fill(store: ObjectStore, num_rows: int) -> None:
    """Puts table and shards into the bucket ``rows``."""
    import pyarrow
    from pyarrow import parquet
    from pyarrow.fs import FileSystem

    system, path = FileSystem.from_uri(store.make_bucket("rows"))
    schema = pyarrow.schema({"x": pyarrow.list_(pyarrow.float32(), WIDTH), "y": pyarrow.int64()})
    with (
        system.open_output_stream(f"{path}/table/part.parquet") as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for begin in range(0, num_rows, GROUP):
            some = rows_of(begin, min(begin + GROUP, num_rows))
            x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(some["x"].ravel()), WIDTH)
            writer.write_table(pyarrow.table({"x": x, "y": some["y"]}, schema), row_group_size=GROUP)
    for begin in range(0, num_rows, SHARD):
        some = rows_of(begin, min(begin + SHARD, num_rows))
        with (
            system.open_output_stream(f"{path}/shards/{begin // SHARD:05d}.tar") as file,
            tarfile.open(fileobj=file, mode="w|") as tar,
        ):
            for x, y in zip(some["x"], some["y"], strict=True):
                info = tarfile.TarInfo(f"{y:09d}.bin")
                info.size = x.nbytes + 8
                tar.addfile(info, io.BytesIO(x.tobytes() + int(y).to_bytes(8, "little")))


def run(args: argparse.Namespace) -> int:
    found = []
    with serving() as store, tempfile.TemporaryDirectory(dir=args.folder) as folder:
        os.environ.update(store.environment)
        fill(store, args.rows)
        packed = f"{folder}/packed.h5"
        words = ["data", "pack", "s3://rows/table", "--kind", "parquet", "-o", packed]
        subprocess.run([sys.executable, "-m", "hpctrain", *words], check=True, stdout=subprocess.DEVNULL)
        sources = {"packed": packed, "table": "s3://rows/table"}
        if importlib.util.find_spec("webdataset"):
            shards = -(-args.rows // SHARD)
            sources["webdataset"] = f"{store.url}/rows/shards/{{00000..{shards - 1:05d}}}.tar"
        for name, address in sources.items():
            forget(Path(packed))
            os.environ["HPCTRAIN_CACHE"] = f"{folder}/cache-{name}"
            options = {"--kind": name, "--address": address, "--epochs": str(args.epochs), "--rows": str(args.rows)}
            found += on_ranks("benchmarks.reading_ranks", options, args.ranks)
    if args.json:
        foreign_text.show(json.dumps({"rows": found}))
        return ExitCode.DONE
    for row in found:
        rates = " ".join(f"{rate:>10,.0f}" for rate in row["samples_per_s"])
        memory = " ".join(f"{size / 2**20:>6.0f}" for size in row["uss_bytes"])
        foreign_text.show(f"{row['kind']:<12} samples/s by epoch {rates}   MiB of a rank {memory}")
    return ExitCode.DONE


def forget(path: Path) -> None:
    """Takes a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(start("reading", "samples a second from a packed file, a table in a store, and tars", add_arguments, run))
