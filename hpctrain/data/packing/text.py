"""Text as a source: one long row of tokens, cut into samples of equal length. Each text is read and encoded once."""

from __future__ import annotations

import codecs
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpctrain.data.dataset import Field, Samples
from hpctrain.data.formats.hdf5_files import look_at
from hpctrain.data.packing.source import Source, block_samples
from hpctrain.data.packing.tokenizer import Tokenizer
from hpctrain.errors import UserError, file_errors

LINES = (".jsonl", ".ndjson")
SUFFIXES = (".txt", ".md", ".rst", *LINES)
"""Of files in a folder that are taken for text."""
PIECE_BYTES = 4 * 2**20
"""Read and encoded at once; longer texts are cut at the ends of lines."""
SMALL_VOCABULARY = 2**16
"""Whose tokens fit into 16 bits."""


@dataclass(frozen=True)
class TextForm:
    """How text becomes samples."""

    tokenizer: Tokenizer
    context: int
    """Tokens that a model sees at once; a sample has one more, since each is the target of those before it."""
    field: str = "text"
    """Of the objects in files of JSON lines."""


@dataclass(frozen=True)
class TextChunk:
    """Some text."""

    text: str
    ends: bool
    """Whether it is the end of a document."""
    num_bytes: int
    """Read from the file since the piece before."""


@contextlib.contextmanager
def text_source(
    files: Sequence[Path], form: TextForm, folder: Path, on_progress: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[Source]:
    """``tokens``: uint16[context + 1], or int32 if the vocabulary is larger. Each sample begins with the last token of
    the one before it; what is left at the end and fills no sample is dropped.

    Args:
        files: of ``files_of``: plain text, each file of which is a document; JSON lines, each line of which is one.
        form: how they become samples.
        folder: where tokens wait until all are counted, in a file without a name.
        on_progress: called with the number of bytes that were read since.

    Raises:
        UserError: a file is not text, all together are too short for a sample, or the folder is full.
    """
    dtype = np.dtype(np.uint16 if form.tokenizer.vocabulary <= SMALL_VOCABULARY else np.int32)
    with contextlib.ExitStack() as stack:
        spool = stack.enter_context(spooled(folder))
        with keeping_tokens(folder):
            documents, tokens = fill(spool, pieces_of(files, form.field), form.tokenizer, dtype, on_progress)
        samples = (tokens - 1) // form.context
        if samples < 1:
            raise UserError(
                f"the text has {tokens} tokens, and a sample of context {form.context} takes {form.context + 1}",
                "give more text, or a shorter --context",
            )
        notes = {
            "tokenizer": form.tokenizer.name,
            **({"tokenizer_sha256": form.tokenizer.sha256} if form.tokenizer.sha256 else {}),
            "vocabulary": form.tokenizer.vocabulary,
            "end_of_text": form.tokenizer.end,
            "context": form.context,
            "documents": documents,
            "tokens": tokens,
        }
        fields = {"tokens": Field((form.context + 1,), dtype)}

        def blocks() -> Iterator[Samples]:
            step = block_samples(fields)
            for begin in range(0, samples, step):
                count = min(step, samples - begin)
                spool.seek(begin * form.context * dtype.itemsize)
                row = np.frombuffer(spool.read((count * form.context + 1) * dtype.itemsize), dtype)
                yield {"tokens": np.lib.stride_tricks.sliding_window_view(row, form.context + 1)[:: form.context]}

        yield Source(fields, samples, blocks, notes)


@contextlib.contextmanager
def spooled(folder: Path) -> Iterator[IO[bytes]]:
    """A file without a name."""
    with keeping_tokens(folder):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 closed below
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # closing tries once more to write what could not be written
            file.close()


def fill(
    spool: IO[bytes],
    pieces: Iterator[TextChunk],
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    on_progress: Callable[[int], None],
) -> tuple[int, int]:
    """Writes the tokens of all pieces; gives the numbers of documents and tokens."""
    documents = tokens = 0
    end = np.array([tokenizer.end])
    for some in batched(pieces):
        for piece, ids in zip(some, tokenizer.encode([piece.text for piece in some]), strict=True):
            row = np.concatenate([ids, end]) if piece.ends else ids
            documents, tokens = documents + piece.ends, tokens + len(row)
            spool.write(row.astype(dtype).tobytes())
        on_progress(sum(piece.num_bytes for piece in some))
    spool.flush()
    return documents, tokens


def batched(pieces: Iterator[TextChunk]) -> Iterator[list[TextChunk]]:
    """Many short ones at a time: a tokenizer encodes them side by side."""
    some: list[TextChunk] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece.text)
        if size >= PIECE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files, those of folders by name. Raises UserError if one cannot be read, or a folder has none."""
    files: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            shown = (one for one in path.rglob("*") if not any(part[0] == "." for part in one.relative_to(path).parts))
            inside = sorted(one for one in shown if one.suffix.lower() in SUFFIXES and one.is_file())
        if not inside:
            raise UserError(f"{path} holds no text", f"give a folder of {', '.join(SUFFIXES)}, or name its files")
        for one in inside:
            look_at(one)
        files += inside
    return files


def pieces_of(files: Sequence[Path], field: str) -> Iterator[TextChunk]:
    """The text of all files."""
    for path in files:
        with file_errors(f"{path} cannot be read", "correct its path or its permissions"):
            yield from of_lines(path, field) if path.suffix.lower() in LINES else of_text(path)


def of_text(path: Path) -> Iterator[TextChunk]:
    """A file that is one document, its line ends as they are."""
    decoder, rest, begin = codecs.getincrementaldecoder("utf-8-sig")(), "", 0
    with path.open("rb") as file:
        while True:
            block = file.read(PIECE_BYTES)
            try:
                text = rest + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} is not text in UTF-8: {error.reason}, {error.object[error.start]:#04x} near byte "
                    f"{begin + error.start}",
                    "save it as UTF-8, such as: iconv -f latin1 -t utf-8",
                ) from error
            if not block:
                if text or begin:
                    yield TextChunk(text, True, 0)
                return
            begin += len(block)
            cut = text.rfind("\n") + 1 or len(text)
            rest = text[cut:]
            yield TextChunk(text[:cut], False, len(block))


def of_lines(path: Path, field: str) -> Iterator[TextChunk]:
    """A file of which each line is an object with a text, which is a document; empty ones do not count."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = of_object(line, field, f"{path}, line {number}") if line.strip() else ""
            if text:
                yield TextChunk(text, True, len(line))


def of_object(line: bytes, field: str, where: str) -> str:
    """The text of a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}", "write one object per line") from error
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f"{where} is not an object with a text {field!r}", "name the field that has the text: --text-field NAME"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has half a character: {error.reason}", "correct the line, or leave it out") from error
    return text


def keeping_tokens(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Raises UserError for errors of the file system."""
    return file_errors(f"tokens cannot be written to {folder}", "make room, or write the output elsewhere")
