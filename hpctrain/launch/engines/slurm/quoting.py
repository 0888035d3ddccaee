"""Text that goes into a job script: what cannot go is refused, the rest reaches its command unchanged."""

from __future__ import annotations

import re
import shlex

from hpctrain.errors import UserError

LONGEST = 4096
"""sbatch reads a directive into a buffer of 8192 bytes; the kernel limits file paths to 4096."""

VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def text(value: str, key: str) -> str:
    """The value, if a script can hold it: no control characters (newlines, NUL, escapes), not endless."""
    bad = next((character for character in value if not character.isprintable() and character != "\u00a0"), None)
    if bad is not None:
        raise UserError(f"{key} contains {bad!r}", "remove the control character")
    if len(value.encode("utf-8", "surrogateescape")) > LONGEST:
        raise UserError(f"{key} is longer than {LONGEST} bytes", "shorten it")
    return value


def shell_word(value: str) -> str:
    """One word for bash, whatever the value holds; newlines included."""
    if "\0" in value:
        raise UserError(f"{value!r} contains a NUL character", "remove it")
    return shlex.quote(value)


def variable(name: str, key: str) -> str:
    """The name, if a shell variable can have it."""
    if not VARIABLE.fullmatch(name):
        raise UserError(f"{key} has the name {name!r}", "use letters, digits and '_', not beginning with a digit")
    return name


def directive_value(value: str) -> str:
    """A value as sbatch's own parser of ``#SBATCH`` lines reads it: not bash's.

    Between double quotes it takes everything but quotes and backslashes as it stands, and a backslash before any
    character makes that one plain.
    """
    if re.fullmatch(r"[\w.,:;/@%+=*&|()\[\]-]+", value, re.ASCII):
        return value
    return '"' + re.sub(r"([\\\"'#])", r"\\\1", value) + '"'
