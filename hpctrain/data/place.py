"""Where errors in users' code arose."""

from __future__ import annotations

import traceback


def with_place(error: BaseException) -> str:
    """The error and where it arose: ``ValueError: bad angle (augment.py:12 in rotate)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
