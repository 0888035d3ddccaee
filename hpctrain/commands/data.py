"""``hpctrain data pack`` and ``hpctrain data info``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.packing.pack_source import PackSource, parse_fields
from hpctrain.data.packing.read import NAMES, kind_of, open_source
from hpctrain.data.packing.text import TextForm, files_of, open_tokenizer, text_source
from hpctrain.data.packing.write import prepare, write_hdf5
from hpctrain.errors import ExitCode, UserError
from hpctrain.system import foreign_text
from hpctrain.system.quantities import positive, size

MOST_CHARACTERS = 80
"""Maximum length of a note that ``info`` shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="pack|info")
    text = "make an HDF5 file for training from .npz, .npy, .nc, tables (CSV, Parquet, ORC), images or text"
    pack = actions.add_parser("pack", help=text, description=text)
    add = pack.add_argument
    add(
        "sources",
        nargs="+",
        metavar="SRC",
        help="files of one kind, whose samples are concatenated (of .npy files, each is an array with its name); a "
        "folder of images, or with one folder of images per class; with --kind text, parquet, csv, json or orc a "
        "folder of such files. Tables may be URIs (s3://bucket/folder)",
    )
    add("-o", "--output", required=True, type=Path, metavar="OUT.h5", help="the file to make")
    add("--kind", choices=NAMES, help="by default taken from the suffix")
    add(
        "--field",
        action="append",
        default=[],
        metavar="NAME[=COLUMN,...]",
        help="take this column or array; tables: make one array of several columns (* is all others); by default "
        "everything is taken and each column is an array",
    )
    add("--columns", metavar="A,B", help="columns to take, one array each; short for --field A --field B")
    add(
        "--dtype",
        action="append",
        default=[],
        metavar="[NAME=]DTYPE",
        help="store the array NAME, or all arrays of floats, in this dtype",
    )
    add("--size", metavar="HxW", help="images: scale to this height and width")
    add("--context", type=positive, metavar="N", help="text: tokens per sample (default 1024)")
    add("--tokenizer", type=Path, metavar="FILE", help="text: a Hugging Face tokenizer.json; by default bytes")
    add("--end-of-text", metavar="TOKEN", help="text: token that ends each text, such as <|endoftext|>")
    add("--text-field", metavar="NAME", help="JSON lines: the field that has the text (default text)")
    add("--chunks", type=positive, metavar="N", help="store in chunks of N samples; by default contiguous")
    add("--compression", choices=["gzip", "lzf"], help="compress chunks: smaller, and many times slower to read")
    add("--force", action="store_true", help="replace OUT.h5 if it exists")
    add("--json", action="store_true", help="print what was made as JSON")
    text = "show what a data set holds, and how fast it reads"
    info = actions.add_parser("info", help=text, description=text)
    info.add_argument("file", metavar="FILE", help="an HDF5 file, or a quoted pattern of several")
    info.add_argument("--seconds", type=float, default=1.0, help="seconds per measurement (default 1)")
    info.add_argument("--kind", choices=["netcdf"], help="decode arrays by netCDF attributes; default for .nc")
    info.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    return run_pack(args) if args.action == "pack" else run_info(args)


def run_pack(args: argparse.Namespace) -> int:
    """Makes a file."""
    there = [one for one in (args.output, *args.sources) if os.path.exists(one)]
    if args.output in there and any(os.path.samefile(args.output, one) for one in there[1:]):
        raise UserError(f"{args.output} is both source and output", "choose another --output")
    with opened_source(args) as source:
        dtypes = parse_dtypes(args.dtype, source)
        with progress_bar("packing", source.length, "samples", quiet=args.json) as advance:
            write_hdf5(args.output, source, dtypes, args.chunks, args.compression, args.force, advance)
        show_packed(args, source, dtypes)
    return ExitCode.DONE


def show_packed(args: argparse.Namespace, source: PackSource, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    """Prints what was packed."""
    arrays = [
        {"name": name, "dtype": dtypes.get(name, field.dtype).name, "shape": list(field.shape)}
        for name, field in source.fields.items()
    ]
    num_bytes = args.output.stat().st_size
    made = {"path": str(args.output), "samples": source.length, "bytes": num_bytes, "fields": arrays}
    listed = ", ".join(f"{array['name']} {array['dtype']}{array['shape'] or ''}" for array in arrays)
    text = f"{args.output}: {source.length} samples of {listed}; {size(num_bytes)}"
    foreign_text.answer(args.json, made, [text])


@contextlib.contextmanager
def opened_source(args: argparse.Namespace) -> Iterator[PackSource]:
    """Opens the data to pack."""

    kind = kind_of(args.sources, args.kind)
    of_text = {"context": args.context, "tokenizer": args.tokenizer, "end-of-text": args.end_of_text}
    of_text["text-field"] = args.text_field
    of_others = {"field": args.field, "columns": args.columns, "size": args.size}
    wrong = [name for name, value in (of_others if kind == "text" else of_text).items() if value]
    if wrong:
        raise UserError(f"--{wrong[0]} is given for {kind}", f"leave out --{wrong[0]}: it is for other kinds of files")
    if kind != "text":
        columns = parse_fields([*args.field, *(args.columns.split(",") if args.columns else [])])
        size = parse_size(args.size)
        yield open_source(args.sources, kind, columns, size)
        return
    form = TextForm(open_tokenizer(args.tokenizer, args.end_of_text), args.context or 1024, args.text_field or "text")
    prepare(args.output, args.force)  # fail early, before text is tokenized
    files = files_of([Path(source) for source in args.sources])
    num_bytes = sum(path.stat().st_size for path in files)
    with contextlib.ExitStack() as reading:
        advance = reading.enter_context(progress_bar("tokenizing", num_bytes, "bytes", quiet=args.json))
        with text_source(files, form, args.output.parent, advance) as source:
            reading.close()
            yield source


def run_info(args: argparse.Namespace) -> int:
    """Shows what a dataset holds."""
    from hpctrain.data.info import describe

    about = describe(args.file, args.seconds, args.kind)
    if args.json:
        foreign_text.show(json.dumps(about))
    else:
        print_info(about)
    return ExitCode.DONE


def print_info(about: Mapping[str, Any]) -> None:
    """Prints it as a table."""
    rows = (
        (field["name"], field["dtype"], " x ".join(map(str, field["shape"])) or "scalar", field["layout"])
        for field in about["fields"]
    )
    foreign_text.table(about["source"], ("array", "dtype", "shape of a sample", "layout"), rows)
    files = f" in {about['files']} files" if about["files"] > 1 else ""
    facts = {
        "samples": f"{about['samples']}{files}, {about['bytes_per_sample']} bytes each",
        "fingerprint": about["fingerprint"],
        **{name: shortened(value) for name, value in about["notes"].items()},
    }
    for way in ("random", "sequential"):
        speed = about[way]
        facts[way] = f"{speed['samples_per_s']:,.0f} samples/s, {size(speed['bytes_per_s'])}/s"
    for name, fact in facts.items():
        foreign_text.show(f"{foreign_text.line(name):<12} {foreign_text.line(fact)}")
    for hint in about["hints"]:
        foreign_text.show(f"hint: {foreign_text.line(hint)}")


def shortened(value: Any) -> str:
    """Returns a note as one line of JSON, shortened."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Parses height and width, such as ``32x48``."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise UserError(f"--size {text} is not a size", "write height and width, such as --size 224x224")
    return int(match[1]), int(match[2])


def parse_dtypes(texts: Sequence[str], source: PackSource) -> dict[str, np.dtype[Any]]:
    """Returns the dtype of each array that ``--dtype`` changes."""
    chosen: dict[str, np.dtype[Any]] = {}
    for text in texts:
        name, _, dtype_name = text.rpartition("=")
        try:
            dtype = np.dtype(dtype_name)
        except TypeError as error:
            fix = "write one such as float32 or uint8"
            raise UserError(f"--dtype {text}: {dtype_name!r} is not a dtype", fix) from error
        if dtype.kind not in "biufc":
            raise UserError(f"--dtype {text}: {dtype} is not a number", "write one such as float32 or uint8")
        if name and name not in source.fields:
            raise UserError(f"--dtype {text}: there is no array {name!r}", f"the arrays are {', '.join(source.fields)}")
        names = [name] if name else [name for name, field in source.fields.items() if field.dtype.kind == "f"]
        chosen |= dict.fromkeys(names, dtype)
    return chosen


@contextlib.contextmanager
def progress_bar(title: str, total: int, unit: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
