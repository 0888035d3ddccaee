"""``python -m benchmarks.storage``: H100s that this node feeds with data, by MLPerf Storage's measure.

Emulated accelerators take batches of generated files and sleep as long as a step takes on an H100. Their utilisation is
the share of time in which they compute. The result is the largest number of accelerators whose utilisation reaches the
published limit. Contenders take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from benchmarks.program import start
from benchmarks.storage.accelerators import ENVIRONMENT, fill, taken, utilisation
from benchmarks.storage.readers import READERS
from benchmarks.storage.workloads import WORKLOADS, Workload, drop_pages
from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME")
    installed = [name for name, reader in READERS.items() if importlib.util.find_spec(reader.module)]
    about = f"of {', '.join(READERS)} (default: those that are installed)"
    parser.add_argument("--only", nargs="+", choices=list(READERS), default=installed, metavar="READER", help=about)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=list(range(1, 9)),
        help="numbers of accelerators, ascending (default: 1 to 8)",
    )
    about = "turns of each contender, of which the median counts; none more once most agree (default: 3)"
    parser.add_argument("--rounds", type=int, default=3, help=about)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn (default: 4)")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes per accelerator of WebDataset, Streaming, PyTorch"
    )
    about = "generated samples (default: some 600 MB per format; with --cold, what the longest turn reads)"
    parser.add_argument("--samples", type=int, help=about)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="file system to measure")
    parser.add_argument(
        "--keep", action="store_true", help="keep the files in --folder, and use those of an earlier run"
    )
    parser.add_argument(
        "--cold", action="store_true", help="drop the files from the node's page cache before each turn"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Generates, measures, prints."""
    os.environ.update(ENVIRONMENT)
    found = []
    for name in args.workloads:
        workload = WORKLOADS[name]
        default = taken(workload, max(args.sizes), args.seconds) if args.cold else workload.samples
        workload = replace(workload, samples=args.samples or default)
        with files(args, workload) as folder:
            if not args.json:
                foreign_text.show(heading(workload))
            rows: dict[str, list[tuple[int, float]]] = {reader: [] for reader in args.only}
            for reader, size, share in measured(args, workload, folder):
                rows[reader].append((size, share))
                if not args.json:
                    rate = size * share * workload.bytes_per_s / 1e6
                    foreign_text.show(f"{reader:<14} {size:>2} accelerators  {share:>6.1%}  {rate:>7,.0f} MB/s")
        for reader, shares in rows.items():
            fed = max((size for size, share in shares if share >= workload.utilisation), default=0)
            found.append({"workload": name, "reader": reader, "fed": fed, "utilisation": shares})
            if not args.json:
                more = " or more" if fed == args.sizes[-1] else ""
                each = ", ".join(f"{share:.0%}" for _, share in shares)
                foreign_text.show(f"{name}: {reader} feeds {fed}{more} ({each})")
    if args.json:
        foreign_text.show(json.dumps({"rows": found, "cold": args.cold, "workers": args.workers}))
    return ExitCode.DONE


@contextmanager
def files(args: argparse.Namespace, workload: Workload) -> Iterator[Path]:
    """Yields a folder with the samples in the format of each reader."""
    kept = args.folder / f"hpctrain-storage-{workload.name}-{workload.samples}"
    with nullcontext(kept) if args.keep else tempfile.TemporaryDirectory(dir=args.folder) as name:
        for kind in sorted({READERS[reader].format for reader in args.only} - {""}):
            folder = Path(name, kind)
            whole = folder / "whole"
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                fill(kind, workload, folder)
                whole.touch()
        yield Path(name)


def measured(args: argparse.Namespace, workload: Workload, folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yields contender, number of accelerators and median utilisation; ends a contender below the limit."""
    left = list(args.only)
    for size in args.sizes:
        shares: dict[str, list[float]] = {reader: [] for reader in left}
        for _ in range(args.rounds):
            for reader in left:
                if is_decided(shares[reader], workload.utilisation, args.rounds):
                    continue
                if args.cold:
                    drop_pages(folder)
                shares[reader].append(utilisation(reader, workload, folder, size, args.workers, args.seconds))
        for reader, each in shares.items():
            share = statistics.median(each)
            yield reader, size, share
            if share < workload.utilisation:
                left.remove(reader)


def is_decided(shares: Sequence[float], limit: float, rounds: int) -> bool:
    """Whether most of all turns are on one side of the limit: the others cannot bring the median to the other."""
    enough = sum(share >= limit for share in shares)
    return max(enough, len(shares) - enough) > rounds / 2


def heading(workload: Workload) -> str:
    """Describes a workload."""
    size = workload.samples * workload.record_bytes / 1e6
    return (
        f"\n{workload.name}: batches of {workload.batch} x {workload.record_bytes} bytes, a step of "
        f"{1e3 * workload.compute_s:g} ms, {workload.bytes_per_s / 1e6:.0f} MB/s per H100; "
        f"{size:.0f} MB per format; limit {workload.utilisation:.0%}"
    )


if __name__ == "__main__":
    sys.exit(
        start("storage", "H100s that this node feeds with data, as MLPerf Storage measures it", add_arguments, run)
    )
