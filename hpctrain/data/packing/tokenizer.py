"""Tokenizers: UTF-8 bytes, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.formats.hdf5_files import look_at
from hpctrain.errors import UserError, requires

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Common names of the end-of-text token."""
LARGEST_TOKEN = 2**31 - 1
"""Tokens are stored as int32 at most."""


class Tokenizer(Protocol):
    """Encodes texts independently of each other."""

    @property
    def name(self) -> str:
        """Name for display."""

    @property
    def sha256(self) -> str | None:
        """Hash of the tokenizer's file; None if there is no file."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens; every token is smaller than this."""

    @property
    def end(self) -> int:
        """The token that ends each text."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of each text, int[n], without the end-of-text token."""


@dataclass(frozen=True)
class Bytes:
    """The 256 byte values of UTF-8, plus a token for the end of a text."""

    name: str = "bytes"
    sha256: None = None
    vocabulary: int = 257
    end: int = 256

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


@dataclass(frozen=True)
class HuggingFace:
    """A tokenizer from a ``tokenizer.json``. Create it with ``open_tokenizer``."""

    name: str
    sha256: str
    vocabulary: int
    end: int
    tokenizer: Any

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        try:
            encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exceptions
            fix = "use a tokenizer that has a token for unknown words"
            raise UserError(f"{self.name} cannot encode the text: {error}", fix) from error
        return [np.array(one.ids, np.int64) for one in encoded]


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
        return Bytes()
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
    if largest > LARGEST_TOKEN:
        fix = "number its tokens from 0 without large gaps"
        raise UserError(f"{path} has token {largest}, and files hold tokens up to {LARGEST_TOKEN}", fix)
    found = [words[each] for each in ([end] if end is not None else ENDS) if each in words]
    if not found:
        fix = "name one that it has: --end-of-text TOKEN"
        raise UserError(f"{path} has no token {end or ' or '.join(ENDS)} to end a text", fix)
    return HuggingFace(path.name, hashlib.sha256(content).hexdigest(), largest + 1, found[0], tokenizer)
