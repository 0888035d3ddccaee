"""Which backend Keras will use, without importing it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def keras_backend(environ: Mapping[str, str] = os.environ) -> str:
    """KERAS_BACKEND; else PyTorch if ``keras.json`` names it or TensorFlow is not installed; else TensorFlow."""
    if given := environ.get("KERAS_BACKEND"):
        return given
    folder = Path(environ.get("KERAS_HOME") or Path.home() / ".keras")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / "keras.json").read_text(encoding="utf-8")).get("backend") == "torch":
            return "torch"
    return "torch" if not find_spec("tensorflow") and find_spec("torch") else "tensorflow"
