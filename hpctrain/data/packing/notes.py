"""What a packed file says about itself: classes of images, the tokenizer of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.data.formats.hdf5_files import LinkedFiles, asking
from hpctrain.errors import UserError

NOTES = "hpctrain"
"""Attribute of the file that holds a source's notes, as JSON."""


def packed_notes(path: str | Path) -> dict[str, Any]:
    """What ``hpctrain data pack`` noted in a file.

    Args:
        path: an HDF5 file.

    Returns:
        Of text: ``vocabulary`` (number of tokens that there are), ``context``, ``tokenizer`` (name of its file, or
        bytes), ``tokenizer_sha256``, ``end_of_text`` (a token), ``documents`` and ``tokens`` (numbers). Of images:
        ``classes``, a list of names. Empty if the file says nothing.

    Raises:
        UserError: the file is missing, is not HDF5, or its notes are damaged.
    """
    path = Path(path)
    with asking(path), LinkedFiles(path) as files:
        text = files.root().attrs.get(NOTES, "{}")
    try:
        notes = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        notes = None
    if not isinstance(notes, dict):
        raise UserError(
            f"the attribute {NOTES!r} of {path} holds no notes of hpctrain data pack", "pack the file again"
        )
    return notes
