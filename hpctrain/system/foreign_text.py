"""Shows text written by others without letting the terminal interpret it.

All of hpctrain's output goes through ``show``. Files of a run folder, job names and host names are written by others,
and control sequences in them could hide lines, rename the terminal's window or paste text.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import TextIO

MOST_CHARACTERS = 4096
"""Longest text within a sentence or a table cell."""
SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erasing
    r"|(?:\x1b[PX\]^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\|\x9c)"  # strings: OSC, DCS, ...
    r"|\x1b[ -/]*[0-~]"
)
"""Complete control sequences of ECMA-48; incomplete ones are removed character by character."""


def plain(text: str) -> str:
    """Removes control characters and sequences. Newlines and tabs stay; carriage returns become newlines."""
    if text.isprintable():
        return text
    text = SEQUENCES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "".join(filter(None, map(_visible, text)))


def line(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """Makes ``plain`` text of one line of bounded length, for a sentence or a table cell."""
    cut = text if len(text) <= most_characters else text[:most_characters] + " ..."
    return cut if cut.isprintable() else " ".join(plain(cut).split()).encode("utf-8", "backslashreplace").decode()


def show(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Prints ``plain`` text, by default to stdout, and flushes. Characters that the encoding lacks are escaped."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(plain(text).encode(encoding, "backslashreplace").decode(encoding), file=stream, end=end, flush=True)


def answer(as_json: bool, data: object, lines: Iterable[str]) -> None:
    """Shows a command's result: ``data`` as JSON, or ``lines`` for people, if there are any."""
    if said := json.dumps(data) if as_json else "\n".join(lines):
        show(said)


def table(title: str, headers: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Shows a table of lines."""
    from rich.console import Console
    from rich.table import Column, Table

    shown = Table(*(Column(line(header), overflow="fold") for header in headers), box=None)
    for row in rows:
        shown.add_row(*map(line, row))
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(line(title), style="bold")  # as the table's own title it would be wrapped to the table's width
    console.print(shown)


def _visible(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    kind = unicodedata.category(character)
    if kind == "Cs":  # a surrogate, which ``show`` escapes
        return character
    return " " if kind == "Zs" else ""
