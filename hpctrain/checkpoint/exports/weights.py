"""Weights of a checkpoint for other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hpctrain.checkpoint.exports import safetensors
from hpctrain.checkpoint.reading import Loaded
from hpctrain.errors import UserError
from hpctrain.system.files import replacement

MODEL = "model/"
"""Prefix of the model's parameters and buffers in a checkpoint."""
AVERAGE = "ema/"
"""Prefix of moving averages of parameters."""


def model_weights(loaded: Loaded, averaged: bool = False) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The model's arrays and logical types, by name without ``model/``.

    Args:
        loaded: a checkpoint.
        averaged: take the moving average if a weight has one.

    Raises:
        UserError: there are no weights, or no average.
    """
    source = {name.removeprefix(MODEL): name for name in loaded.arrays if name.startswith(MODEL)}
    average = {name.removeprefix(AVERAGE): name for name in loaded.arrays if name.startswith(AVERAGE)}
    if not source:
        raise UserError(
            f"{loaded.path} holds no model", f"its names begin with {sorted({n.split('/')[0] for n in loaded.arrays})}"
        )
    if averaged and not average:
        raise UserError(f"{loaded.path} holds no averaged weights", "set train.ema_decay, or export without --ema")
    if averaged:
        source |= {name: average[name] for name in source if name in average}
    others = loaded.meta.get("other_names")
    for name, saved in others.items() if isinstance(others, dict) else ():  # tied weights: stock loaders want each name
        if isinstance(saved, str) and saved in source:
            source[name] = source[saved]
    arrays = {name: loaded.arrays[full] for name, full in source.items()}
    return arrays, {name: loaded.dtypes[full] for name, full in source.items()}


def export_safetensors(loaded: Loaded, path: Path, averaged: bool = False) -> None:
    """Writes a .safetensors file. Raises UserError."""
    arrays, dtypes = model_weights(loaded, averaged)
    complex_name = next((name for name, dtype in dtypes.items() if dtype.startswith("complex")), None)
    if complex_name:
        raise UserError(f"{complex_name} is complex, which safetensors does not know", "export to a .pt file")
    write_whole(path, safetensors.encode(arrays, dtypes, {"format": "pt", "step": str(loaded.step)}))


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file in one go. Raises UserError if it cannot be written."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.writelines(parts)

    replace_whole(path, write)


def replace_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Replaces a file by what ``write`` puts into one of the same suffixes. Raises UserError."""
    try:
        with replacement(path) as temporary:
            write(temporary)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", "choose another --output") from error
