"""Reads weights from Hugging Face model folders, distributed checkpoints of PyTorch, and weight files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from hpctrain.checkpoint import dcp, safetensors
from hpctrain.checkpoint.format.durable_files import is_absent, reading
from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.checkpoint.format.strict_json import JsonReader, parse_json
from hpctrain.checkpoint.lora import Weights
from hpctrain.checkpoint.read_retry import retry_read
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.system.retry import retry_files
from hpctrain.train.saved_arrays import DerivedArrays, HeldArrays, Place

MODEL = "model/"
"""Prefix of the model's parameters and buffers in a checkpoint."""
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
INDEX = "model.safetensors.index.json"
"""Says in which file of a Hugging Face model in several files each weight is."""
OF_FOLDERS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", dcp.METADATA)
"""Names of single-file Hugging Face models and PEFT adapters in a folder, and of DCP's list of chunks."""


def join_weights(parts: Iterable[Weights], prefix: str = "") -> Weights:
    """Merge the weights whose names start with ``prefix``, by name without ``model/``."""
    places: dict[str, Place] = {}
    dtypes: dict[str, str] = {}
    for part in parts:
        names = {name.removeprefix(MODEL): name for name in part.arrays if name.startswith(prefix)}
        places |= {plain: (part.arrays, name) for plain, name in names.items()}
        dtypes |= {plain: part.dtypes[name] for plain, name in names.items()}
    return Weights(DerivedArrays(places), dtypes)


def open_weight_files(path: str) -> Weights | None:
    """Open the weights of a folder of Hugging Face or DCP, or of a file; None for other folders."""
    files = retry_files(partial(files_of, Path(path)))
    return join_weights(map(weights_of_file, files)) if files else None


def weights_of_file(path: Path) -> Weights:
    """Open the weights in a file."""
    if is_absent(path):
        raise UserError(f"{path} does not exist", "check checkpoint.init_from")
    real = Path(os.path.realpath(path))  # links in the user's path are followed; those in a checkpoint never are
    if path.name.endswith((*TORCH_FILES, dcp.METADATA)):
        try:
            from hpctrain.backends.torch.state.tensors import read_tensor, read_weights
        except ModuleNotFoundError:
            fix = "save the weights as .safetensors"
            raise UserError(f"{path} is read with PyTorch, which is not installed", fix) from None
        if path.name == dcp.METADATA:
            return Weights(*retry_read(lambda: dcp.read(real, read_tensor)))

        def read() -> tuple[dict[str, Array], dict[str, str]]:
            with reading(real) as descriptor, open(descriptor, "rb", closefd=False) as file:
                return read_weights(file, real, ITEM_TYPES)

        arrays, dtypes = retry_read(read)
        return Weights(HeldArrays(arrays), dtypes)
    return Weights(*retry_read(lambda: safetensors.read(real)))


def files_of(folder: Path) -> list[Path]:
    """The weight files in a folder of Hugging Face or DCP; empty for other folders, and itself if it is none.

    Raises DamagedCheckpoint, OSError.
    """
    if not folder.is_dir():
        return [folder]
    if (folder / INDEX).is_file():
        with reading(folder / INDEX) as descriptor, open(descriptor, "rb", closefd=False) as file:
            index = JsonReader(parse_json(file.read(), str(folder / INDEX)), str(folder / INDEX))
        names = JsonReader(index.get("weight_map", dict, "an object"), index.where).value.values()
        if any(type(name) is not str or Path(name).name != name for name in names):
            index.fail("weight_map names what is not a file in its folder")
        return [folder / name for name in sorted(set(names))]
    return next(([folder / name] for name in OF_FOLDERS if (folder / name).is_file()), [])
