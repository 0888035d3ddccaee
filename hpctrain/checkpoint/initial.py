"""Initial weights from a checkpoint or a safetensors file, for fine-tuning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.exports import safetensors
from hpctrain.checkpoint.exports.weights import AVERAGE, MODEL
from hpctrain.checkpoint.format.files import is_absent
from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.checkpoint.patience import patiently
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.store import locate
from hpctrain.errors import UserError
from hpctrain.train.framework import Framework
from hpctrain.train.state import StateTensor


@dataclass(frozen=True)
class Match:
    """Which weights were taken, by name without ``model/``."""

    taken: tuple[str, ...]
    missing: tuple[str, ...]
    """In the model, not in the source: they keep their initial values."""
    unexpected: tuple[str, ...]
    """In the source, not in the model: left out."""
    reshaped: tuple[str, ...]
    """In both, with different shapes: they keep their initial values."""


def match_names(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> Match:
    """Compares shapes by name."""
    both = [name for name in wanted if name in found]
    return Match(
        taken=tuple(name for name in both if wanted[name] == found[name]),
        missing=tuple(name for name in wanted if name not in found),
        unexpected=tuple(name for name in found if name not in wanted),
        reshaped=tuple(name for name in both if wanted[name] != found[name]),
    )


def load_initial(source: str, framework: Framework) -> Match:
    """Gives the model the weights of a source wherever name and shape agree; all else stays as it is.

    A moving average of the weights begins at the weights that were taken.

    Args:
        source: run folder, checkpoint folder, or .safetensors file (names with or without ``model/``).

    Raises:
        UserError: the source is not there, or no name and shape agrees.
        DamagedCheckpoint: it is damaged.
        UnreadableCheckpoint: it cannot be read now.
    """
    arrays, dtypes = weights_of(source)
    state = framework.state()
    wanted = {it.name.removeprefix(MODEL): it.shape for it in state if it.name.startswith(MODEL)}
    match = match_names(wanted, {name: array.shape for name, array in arrays.items()})
    if not match.taken:
        raise UserError(
            f"no weight of {source} has the name and shape of one of the model "
            f"(it has {', '.join(list(arrays)[:3])} ...; the model has {', '.join(list(wanted)[:3])} ...)",
            "rename the weights, or set checkpoint.init_from to a checkpoint of this model",
        )
    values = {it.name: current(it) for it in state}
    for it in state:
        prefix = next((prefix for prefix in (MODEL, AVERAGE) if it.name.startswith(prefix)), None)
        name = it.name.removeprefix(prefix or "")
        if prefix and name in match.taken:
            values[it.name] = converted(arrays[name], dtypes[name], it.dtype)
    framework.synchronize()
    framework.load(values)
    return match


def weights_of(source: str) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Model arrays and their logical types, by name without ``model/``. Every rank reads them by itself."""
    if os.path.isdir(source):
        store, step = locate(source)
        loaded = store.load_into(model_arrays, step)
        arrays, dtypes = dict(loaded.arrays), loaded.dtypes
    elif is_absent(source):
        raise UserError(f"{source} does not exist", "check checkpoint.init_from")
    else:
        path = Path(os.path.realpath(source))  # the user's own path is followed; one from a checkpoint never is
        arrays, dtypes = patiently(lambda: safetensors.read(path))
    plain = {name: name.removeprefix(MODEL) for name in arrays}
    return {plain[name]: array for name, array in arrays.items()}, {plain[name]: dtypes[name] for name in arrays}


def model_arrays(loaded: Loaded) -> dict[str, NDArray[Any]]:
    """The model's part of a checkpoint, without its optimizer's."""
    return {name: loaded.arrays[name] for name in loaded.arrays if name.startswith(MODEL)}


def current(tensor: StateTensor) -> NDArray[Any]:
    """A state tensor's value."""
    value = np.empty(tensor.shape, ITEM_TYPES[tensor.dtype])
    tensor.copy_into(value)
    return value


def converted(array: NDArray[Any], dtype: str, wanted: str) -> NDArray[Any]:
    """An array of another floating-point type; values are rounded if it has fewer bits."""
    if dtype == wanted:
        return array
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if wanted == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even; NaN excepted
    return array.astype(ITEM_TYPES[wanted])
