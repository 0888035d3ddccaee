"""Text as a source: one long sequence of tokens, cut into samples of equal length. Texts are encoded once.

Tokens are UTF-8 bytes, or those of a Hugging Face ``tokenizer.json``.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpctrain.data.dataset import Field, Samples
from hpctrain.data.formats.hdf5_files import look_at
from hpctrain.data.packing.pack_source import PackSource, block_samples
from hpctrain.errors import UserError, file_errors, requires
from hpctrain.system.array_types import Array

LINES = (".jsonl", ".ndjson")
SUFFIXES = (".txt", ".md", ".rst", *LINES)
"""Suffixes of the files in a folder that are read as text."""
PIECE_BYTES = 4 * 2**20
"""Bytes read and encoded at once; longer texts are cut at line ends."""
SMALL_VOCABULARY = 2**16
"""Largest vocabulary whose tokens fit into 16 bits."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Common names of the end-of-text token."""


@dataclass(frozen=True)
class Tokenizer:
    """Encodes texts independently of each other. Create it with ``open_tokenizer``."""

    name: str
    """For display."""
    sha256: str | None
    """Hash of the tokenizer's file; None if there is no file."""
    vocabulary: int
    """Number of tokens; every token is smaller than this."""
    end: int
    """The token that ends each text."""
    encode: Callable[[Sequence[str]], list[Array]]
    """encode(texts) returns the tokens of each text, int[n], without the end-of-text token."""


def encode_bytes(texts: Sequence[str]) -> list[Array]:
    """The byte values of each text in UTF-8."""
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


BYTES = Tokenizer("bytes", None, 257, 256, encode_bytes)
"""The 256 byte values of UTF-8, plus a token for the end of a text."""


def open_tokenizer(path: Path | None, end: str | None = None) -> Tokenizer:
    """Open a tokenizer.

    Args:
        path: a ``tokenizer.json`` written by Hugging Face's ``tokenizers``; None for bytes.
        end: the token to append to each text; by default the first of ``ENDS`` in the vocabulary.

    Raises:
        UserError: the file is missing or not a tokenizer, or it has no such token.
    """
    if path is None:
        if end is not None:
            raise UserError("an end of text is named for bytes, which have their own", "leave out --end-of-text")
        return BYTES
    if path.is_dir():
        raise UserError(f"{path} is a folder", "name the tokenizer.json in it")
    look_at(path)
    with requires("tokenizers", "text"):
        from tokenizers import Tokenizer as Library
    content = path.read_bytes()
    try:
        tokenizer = Library.from_str(content.decode())
    except Exception as error:  # the library raises plain Exceptions
        fix = "give a tokenizer.json, as tokenizers and transformers write it"
        raise UserError(f"{path} is not a tokenizer: {error}", fix) from error
    tokenizer.no_truncation()  # the file may set truncation to a model's maximum length
    tokenizer.no_padding()
    words: dict[str, int] = tokenizer.get_vocab()
    largest = max(words.values(), default=0)
    found = [words[each] for each in ([end] if end is not None else ENDS) if each in words]
    if not found:
        fix = "name one that it has: --end-of-text TOKEN"
        raise UserError(f"{path} has no token {end or ' or '.join(ENDS)} to end a text", fix)

    def encode(texts: Sequence[str]) -> list[Array]:
        try:
            encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exceptions
            fix = "use a tokenizer that has a token for unknown words"
            raise UserError(f"{path.name} cannot encode the text: {error}", fix) from error
        return [np.array(one.ids, np.int64) for one in encoded]

    return Tokenizer(path.name, hashlib.sha256(content).hexdigest(), largest + 1, found[0], encode)


@dataclass(frozen=True)
class TextForm:
    """How text becomes samples."""

    tokenizer: Tokenizer
    context: int
    """Tokens that a model sees at once; a sample has one more, since targets are shifted by one token."""
    field: str = "text"
    """The field of JSON-lines objects that holds the text."""


@dataclass(frozen=True)
class TextChunk:
    """A piece of a document, or a whole one."""

    text: str
    ends: bool
    """Whether the document ends with it."""
    num_bytes: int
    """Bytes read from the file since the previous chunk."""


@contextlib.contextmanager
def text_source(
    files: Sequence[Path], form: TextForm, folder: Path, on_progress: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[PackSource]:
    """A source with the field ``tokens``: uint16[context + 1], or int32 if the vocabulary is larger. Each sample starts
    with the last token of the previous one; tokens at the end that do not fill a sample are dropped.

    Args:
        files: the result of ``files_of``. A plain-text file is one document; in JSON lines, each line is one.
        form: how text becomes samples.
        folder: where an unnamed temporary file holds the tokens until all are counted.
        on_progress: called with the number of bytes read since the last call.

    Raises:
        UserError: a file is not text, the text is too short for one sample, or the disk is full.
    """
    dtype = np.dtype(np.uint16 if form.tokenizer.vocabulary <= SMALL_VOCABULARY else np.int32)
    with contextlib.ExitStack() as stack:
        spool = stack.enter_context(spooled(folder))
        with keeping_tokens(folder):
            documents, tokens = fill(spool, pieces_of(files, form.field), form.tokenizer, dtype, on_progress)
        samples = (tokens - 1) // form.context
        if samples < 1:
            what = f"the text has {tokens} tokens, and a sample of context {form.context} takes {form.context + 1}"
            raise UserError(what, "give more text, or a shorter --context")
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

        yield PackSource(fields, samples, blocks, notes)


@contextlib.contextmanager
def spooled(folder: Path) -> Iterator[IO[bytes]]:
    """An unnamed temporary file in the folder."""
    with keeping_tokens(folder):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 closed below
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # closing retries a failed write
            file.close()


def fill(
    spool: IO[bytes],
    pieces: Iterator[TextChunk],
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    on_progress: Callable[[int], None],
) -> tuple[int, int]:
    """Write the tokens of all pieces; returns the numbers of documents and tokens."""
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
    """Group the chunks into lists of about PIECE_BYTES characters, which a tokenizer encodes in parallel."""
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
    """The files, with folders replaced by their text files sorted by name, hidden ones excluded.

    Raises:
        UserError: a file cannot be read, or a folder has no text files.
    """
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
    """The text of all files in chunks."""
    for path in files:
        with file_errors(f"{path} cannot be read", "correct its path or its permissions"):
            yield from of_lines(path, field) if path.suffix.lower() in LINES else of_text(path)


def of_text(path: Path) -> Iterator[TextChunk]:
    """A plain-text file as one document; line endings are kept."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    begin = 0
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
    """A JSON-lines file in which each line is a document; empty lines and texts are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = of_object(line, field, f"{path}, line {number}") if line.strip() else ""
            if text:
                yield TextChunk(text, True, len(line))


def of_object(line: bytes, field: str, where: str) -> str:
    """The text in a JSON object; raises UserError if there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}", "write one object per line") from error
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        fix = "name the field that has the text: --text-field NAME"
        raise UserError(f"{where} is not an object with a text {field!r}", fix)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has half a character: {error.reason}", "correct the line, or leave it out") from error
    return text


def keeping_tokens(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turn file-system errors in the body into UserErrors."""
    return file_errors(f"tokens cannot be written to {folder}", "make room, or write the output elsewhere")
