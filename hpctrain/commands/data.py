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

MOST_CHARACTERS = 80
"""Of a note of a file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The group's own commands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="pack|info")
    pack = actions.add_parser(
        "pack", help="make an HDF5 file for training from .npz, .npy, CSV, images, Parquet or text"
    )
    pack.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SRC",
        help="files of one kind, whose samples are put one after the other; .npy files, which each give an array of "
        "their name; a folder of images, or of one folder of images for each class; with --kind text a folder of texts",
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
    pack.add_argument("--context", type=int, metavar="N", help="text: tokens that a model sees at once (default 1024)")
    pack.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="text: a tokenizer.json of Hugging Face; by default bytes"
    )
    pack.add_argument(
        "--end-of-text", metavar="TOKEN", help="text: the tokenizer's token behind each text, such as <|endoftext|>"
    )
    pack.add_argument("--text-field", metavar="NAME", help="JSON lines: the field that has the text (default text)")
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
    from hpctrain.data.packing import write_hdf5

    if args.chunks is not None and args.chunks < 1:
        raise UserError(f"--chunks is {args.chunks}", "give at least 1 sample a chunk")
    with opened_source(args) as source:
        dtypes = parse_dtypes(args.dtype, source)
        with progress_bar("packing", source.length, "samples", quiet=args.json) as advance:
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


@contextlib.contextmanager
def opened_source(args: argparse.Namespace) -> Iterator[Source]:
    """What is to be packed."""
    from hpctrain.data.packing import (
        TextForm,
        files_of,
        kind_of,
        open_source,
        open_tokenizer,
        parse_fields,
        prepare,
        text_source,
    )

    kind = kind_of(args.sources, args.kind)
    of_text = {"context": args.context, "tokenizer": args.tokenizer, "end-of-text": args.end_of_text}
    of_text["text-field"] = args.text_field
    of_others = {"field": args.field, "size": args.size}
    wrong = [name for name, value in (of_others if kind == "text" else of_text).items() if value]
    if wrong:
        raise UserError(f"--{wrong[0]} is given for {kind}", f"leave out --{wrong[0]}: it is for other kinds of files")
    if kind != "text":
        yield open_source(args.sources, kind, parse_fields(args.field), parse_size(args.size), args.allow_outside)
        return
    if args.context is not None and args.context < 1:
        raise UserError(f"--context is {args.context}", "give the number of tokens that a model sees at once")
    form = TextForm(open_tokenizer(args.tokenizer, args.end_of_text), args.context or 1024, args.text_field or "text")
    prepare(args.output, args.force)  # before time is spent
    files = files_of(args.sources)
    num_bytes = sum(path.stat().st_size for path in files)
    with contextlib.ExitStack() as reading:
        advance = reading.enter_context(progress_bar("tokenizing", num_bytes, "bytes", quiet=args.json))
        with text_source(files, form, args.output.parent, advance) as source:
            reading.close()
            yield source


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
    for name, value in about["notes"].items():
        console.print(f"{foreign_text.line(name):<12} {foreign_text.line(shortened(value))}")
    for way in ("random", "sequential"):
        speed = about[way]
        console.print(f"{way:<12} {speed['samples_per_s']:,.0f} samples/s, {speed['bytes_per_s'] / 1e6:,.0f} MB/s")
    for hint in about["hints"]:
        console.print(f"hint: {foreign_text.line(hint)}")


def shortened(value: Any) -> str:
    """A note as JSON, on a line."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


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
def progress_bar(title: str, total: int, unit: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
