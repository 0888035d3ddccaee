"""Initial weights, for fine-tuning: from checkpoints, folders of Hugging Face models, and files of weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.conversion import converted
from hpctrain.checkpoint.exports import safetensors
from hpctrain.checkpoint.exports.weights import AVERAGE, MODEL
from hpctrain.checkpoint.format import Reader
from hpctrain.checkpoint.format.files import is_absent, reading
from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.checkpoint.format.strict_json import parse_json
from hpctrain.checkpoint.initial_match import Match, Source, renamed, require_meant
from hpctrain.checkpoint.patience import patiently
from hpctrain.checkpoint.store import locate
from hpctrain.errors import UserError
from hpctrain.train.framework import Framework
from hpctrain.train.state import StateTensor

TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
KERAS_FILE = ".weights.h5"
INDEX = "model.safetensors.index.json"
"""Of a Hugging Face model in several files."""
OF_FOLDERS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
"""Files of Hugging Face models and of PEFT adapters in one piece."""

Weights = tuple[dict[str, NDArray[Any]], dict[str, str]]
"""Arrays (bfloat16 as uint16) and logical types, by name."""


def load_initial(source: Source, framework: Framework) -> Match:
    """Gives the model the weights of a source wherever name and shape agree; all else stays as it is.

    A moving average of the weights begins at the weights that were taken.

    Args:
        source: run folder, checkpoint folder, folder of a Hugging Face model, or a file: .safetensors, .pt, .pth, .bin
            or .ckpt (names with or without ``model/``), or .weights.h5 for a Keras model.

    Raises:
        UserError: the source is not there or holds more than weights, or the model has weights that it lacks and
            ``source.missing`` does not name.
        DamagedCheckpoint: it is damaged.
        UnreadableCheckpoint: it cannot be read now.
    """
    framework.synchronize()
    if source.path.endswith(KERAS_FILE):
        from hpctrain.checkpoint.tensorflow_initial import load_keras_file

        return load_keras_file(source, framework)
    arrays, dtypes = weights_of(source.path)
    arrays, dtypes = renamed(arrays, source.rename, source.path), renamed(dtypes, source.rename, source.path)
    state = framework.state()
    wanted = {it.name.removeprefix(MODEL): it.shape for it in state if it.name.startswith(MODEL)}
    match = require_meant(source, wanted, {name: array.shape for name, array in arrays.items()})
    taken = frozenset(match.taken)
    values = {it.name: current(it) for it in state}
    for it in state:
        prefix = next((prefix for prefix in (MODEL, AVERAGE) if it.name.startswith(prefix)), None)
        name = it.name.removeprefix(prefix or "")
        if prefix and name in taken:
            values[it.name] = converted(arrays[name], dtypes[name], it.dtype)
    framework.synchronize()
    framework.load(values)
    return match


def weights_of(source: str) -> Weights:
    """Model arrays and their logical types, by name without ``model/``. Every rank reads them by itself."""
    files = files_of(Path(source)) if os.path.isdir(source) else [Path(source)]
    if not files:
        store, step = locate(source)
        loaded = store.load(step)
        model = {name for name in loaded.arrays if name.startswith(MODEL)}
        arrays, dtypes = {name: loaded.arrays[name] for name in model}, loaded.dtypes
    else:
        arrays, dtypes = {}, {}
        for file in files:
            more, their_dtypes = weights_of_file(file)
            arrays, dtypes = arrays | more, dtypes | their_dtypes
    plain = {name: name.removeprefix(MODEL) for name in arrays}
    return {plain[name]: array for name, array in arrays.items()}, {plain[name]: dtypes[name] for name in arrays}


def weights_of_file(path: Path) -> Weights:
    """What a file holds."""
    if is_absent(path):
        raise UserError(f"{path} does not exist", "check checkpoint.init_from")
    real = Path(os.path.realpath(path))  # the user's own path is followed; one from a checkpoint never is
    if path.name.endswith(TORCH_FILES):
        try:
            from hpctrain.checkpoint.torch_initial import read_torch_file
        except ModuleNotFoundError:
            raise UserError(
                f"{path} is read with PyTorch, which is not installed", "save the weights as .safetensors"
            ) from None
        return patiently(lambda: read_torch_file(real))
    return patiently(lambda: safetensors.read(real))


def files_of(folder: Path) -> list[Path]:
    """The files of weights in the folder of a Hugging Face model; none if it is none. Raises DamagedCheckpoint."""
    if (folder / INDEX).is_file():
        with reading(folder / INDEX) as descriptor, open(descriptor, "rb", closefd=False) as file:
            index = Reader(parse_json(file.read(), str(folder / INDEX)), str(folder / INDEX))
        names = Reader(index.get("weight_map", dict, "an object"), index.where).value.values()
        if any(type(name) is not str or Path(name).name != name for name in names):
            index.fail("weight_map names what is not a file beside it")
        return [folder / name for name in sorted(set(names))]
    return next(([folder / name] for name in OF_FOLDERS if (folder / name).is_file()), [])


def current(tensor: StateTensor) -> NDArray[Any]:
    """A state tensor's value."""
    value = np.empty(tensor.shape, ITEM_TYPES[tensor.dtype])
    tensor.copy_into(value)
    return value
