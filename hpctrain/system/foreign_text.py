"""Text that someone else may have written, on this terminal: shown, never obeyed.

Everything that hpctrain prints goes through ``show``. Files of a run folder, job names and host names are written by
others, and a terminal takes parts of what it is given for commands: to hide lines, to rename its window, to paste.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import TextIO

MOST_CHARACTERS = 4096
"""Of one line that is part of a sentence or a table."""
SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erasing
    r"|(?:\x1b[PX\]^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\|\x9c)"  # strings: OSC, DCS, ...
    r"|\x1b[ -/]*[0-~]"
)
"""Control sequences of ECMA-48, whole; what is left of a torn one is taken out by the character."""


def plain(text: str) -> str:
    """The text without what a terminal would obey. Line ends and tabs stay; what returns to a line's begin, ends it."""
    if text.isprintable():
        return text
    text = SEQUENCES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "".join(filter(None, map(_visible, text)))


def line(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """``plain`` text as one line of bounded length, for a sentence or a cell of a table."""
    cut = text if len(text) <= most_characters else text[:most_characters] + " ..."
    return cut if cut.isprintable() else " ".join(plain(cut).split()).encode("utf-8", "backslashreplace").decode()


def show(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Prints ``plain`` text, on standard output by default, and flushes it. What the encoding lacks is spelled out."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(plain(text).encode(encoding, "backslashreplace").decode(encoding), file=stream, end=end, flush=True)


def answer(as_json: bool, data: object, lines: Iterable[str]) -> None:
    """Shows what a command has found: JSON, or lines for people, if there are any."""
    if said := json.dumps(data) if as_json else "\n".join(lines):
        show(said)


def table(title: str, headers: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Shows a table of lines."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(*map(line, headers), title=title, title_justify="left", box=None)
    for row in rows:
        shown.add_row(*map(line, row))
    Console(highlight=False, markup=False, emoji=False).print(shown)


def _visible(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    kind = unicodedata.category(character)
    return character if kind == "Cs" else " " if kind == "Zs" else ""  # surrogates are spelled out by ``show``
