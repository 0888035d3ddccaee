"""``hpctrain data pack`` and ``hpctrain data info``."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.data.packing.read import NAMES
from hpctrain.errors import ExitCode, UserError
from hpctrain.system import foreign_text

if TYPE_CHECKING:
    import numpy as np

    from hpctrain.data.packing import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The group's own commands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="pack|info")
    pack = actions.add_parser("pack", help="make an HDF5 file for training from .npz, .npy, CSV, images or Parquet")
    pack.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SRC",
        help="files of one kind, whose samples are put one after the other; .npy files, which each give an array of "
        "their name; or a folder of images, or of one folder of images for each class",
    )
    pack.add_argument("-o", "--output", required=True, type=Path, metavar="OUT.h5", help="the file to make")
    pack.add_argument("--kind", choices=NAMES, help="by default taken from the suffix")
    pack.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME[=COLUMN,...]",
        help="take this column or array; CSV, Parquet: make one array of several columns (* is all others); by default "
        "everything is taken and each column is an array",
    )
    pack.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="[NAME=]DTYPE",
        help="store the array NAME, or all arrays of floats, in this dtype",
    )
    pack.add_argument("--size", metavar="HxW", help="images: scale to this height and width")
    pack.add_argument("--chunks", type=int, metavar="N", help="store in chunks of N samples; by default contiguous")
    pack.add_argument(
        "--compression", choices=["gzip", "lzf"], help="compress chunks: smaller, and many times slower to read"
    )
    pack.add_argument("--force", action="store_true", help="replace OUT.h5 if it exists")
    add_outside(pack)
    pack.add_argument("--json", action="store_true", help="print what was made as JSON")
    info = actions.add_parser("info", help="what a dataset holds, and how fast it reads")
    info.add_argument("file", metavar="FILE", help="an HDF5 file, or a quoted pattern of several")
    info.add_argument("--seconds", type=float, default=1.0, help="to measure each kind of reading for (default 1)")
    add_outside(info)
    info.add_argument("--json", action="store_true", help="print JSON")


def add_outside(parser: argparse.ArgumentParser) -> None:
    """The option of both commands that says where HDF5 files may lead to."""
    parser.add_argument(
        "--allow-outside",
        action="append",
        default=[],
        metavar="FOLDER",
        help="let links, virtual sources and external storage of HDF5 files lead to this folder, too; by default only "
        "to that of the file",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    return run_pack(args) if args.action == "pack" else run_info(args)


def run_pack(args: argparse.Namespace) -> int:
    """Makes a file."""
    from hpctrain.data.packing import open_source, parse_fields, write_hdf5

    if args.chunks is not None and args.chunks < 1:
        raise UserError(f"--chunks is {args.chunks}", "give at least 1 sample a chunk")
    source = open_source(args.sources, args.kind, parse_fields(args.field), parse_size(args.size), args.allow_outside)
    dtypes = parse_dtypes(args.dtype, source)
    with progress_bar(source.length, quiet=args.json) as advance:
        write_hdf5(args.output, source, dtypes, args.chunks, args.compression, args.force, advance)
    arrays = [
        {"name": name, "dtype": dtypes.get(name, field.dtype).name, "shape": list(field.shape)}
        for name, field in source.fields.items()
    ]
    num_bytes = args.output.stat().st_size
    if args.json:
        foreign_text.show(
            json.dumps({"path": str(args.output), "samples": source.length, "bytes": num_bytes, "fields": arrays})
        )
    else:
        listed = ", ".join(f"{array['name']} {array['dtype']}{array['shape'] or ''}" for array in arrays)
        foreign_text.show(f"{args.output}: {source.length} samples of {listed}; {num_bytes / 1e6:.1f} MB")
    return ExitCode.DONE


def run_info(args: argparse.Namespace) -> int:
    """Shows what a dataset holds."""
    from hpctrain.data.info import describe

    about = describe(args.file, args.seconds, args.allow_outside)
    if args.json:
        foreign_text.show(json.dumps(about))
    else:
        print_info(about)
    return ExitCode.DONE


def print_info(about: Mapping[str, Any]) -> None:
    """As a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    title = escape(foreign_text.line(about["source"]))
    table = Table("array", "dtype", "shape of a sample", "layout", title=title, title_justify="left")
    for field in about["fields"]:
        shape = " x ".join(map(str, field["shape"])) or "scalar"
        table.add_row(*map(foreign_text.line, (field["name"], field["dtype"], shape, field["layout"])))
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    files = f" in {about['files']} files" if about["files"] > 1 else ""
    console.print(f"samples      {about['samples']}{files}, {about['bytes_per_sample']} bytes each")
    console.print(f"fingerprint  {about['fingerprint']}")
    for way in ("random", "sequential"):
        speed = about[way]
        console.print(f"{way:<12} {speed['samples_per_s']:,.0f} samples/s, {speed['bytes_per_s'] / 1e6:,.0f} MB/s")
    for hint in about["hints"]:
        console.print(f"hint: {foreign_text.line(hint)}")


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Height and width, from ``32x48``."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise UserError(f"--size {text} is not a size", "write height and width, such as --size 224x224")
    return int(match[1]), int(match[2])


def parse_dtypes(texts: Sequence[str], source: Source) -> dict[str, np.dtype[Any]]:
    """The dtype of each array that ``--dtype`` changes."""
    import numpy as np

    chosen: dict[str, np.dtype[Any]] = {}
    for text in texts:
        name, _, dtype_name = text.rpartition("=")
        try:
            dtype = np.dtype(dtype_name)
        except TypeError as error:
            raise UserError(
                f"--dtype {text}: {dtype_name!r} is not a dtype", "write one such as float32 or uint8"
            ) from error
        if dtype.kind not in "biufc":
            raise UserError(f"--dtype {text}: {dtype} is not a number", "write one such as float32 or uint8")
        if name and name not in source.fields:
            raise UserError(f"--dtype {text}: there is no array {name!r}", f"the arrays are {', '.join(source.fields)}")
        names = [name] if name else [name for name, field in source.fields.items() if field.dtype.kind == "f"]
        chosen |= dict.fromkeys(names, dtype)
    return chosen


@contextlib.contextmanager
def progress_bar(samples: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("packing"), BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("packing", total=samples)
        yield lambda count: progress.advance(task, count)
