"""Exports a checkpoint's weights: safetensors files, PyTorch files, and folders for ``from_pretrained``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint import safetensors
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.strict_json import to_json
from hpctrain.checkpoint.initial_match import renamed
from hpctrain.checkpoint.lora import TRAINED_WHOLE, Weights, merge_lora, under_names
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.weight_files import INDEX, MODEL
from hpctrain.errors import UserError, file_errors
from hpctrain.system.files import replace_whole
from hpctrain.train.saved_arrays import SavedArrays
from hpctrain.train.tree import put_together

AVERAGE = "ema/"
"""Prefix of moving averages of parameters."""
EXTRA = "held/model/extra/"
"""Prefix of modules' extra state."""


@dataclass(frozen=True)
class Selection:
    """Which weights of a checkpoint to export, and under which names."""

    averaged: bool | None = None
    """Use the moving average of weights that have one; by default if there is one, since evaluations judge it."""
    trainable_only: bool = False
    """Omit frozen weights and buffers, which leaves the adapter."""
    lora_alpha: float | None = None
    """Merge LoRA adapters, scaled by this number divided by their rank; None leaves them separate."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Replacements of name prefixes."""


WHOLE = Selection()


def model_weights(loaded: Loaded, selection: Selection = WHOLE) -> Weights:
    """The selected arrays and logical types of the model, by name without ``model/``.

    Raises:
        UserError: there are no weights or no averages, or the selection cannot be applied.
    """
    source = {name.removeprefix(MODEL): name for name in loaded.arrays if name.startswith(MODEL)}
    average = {name.removeprefix(AVERAGE): name for name in loaded.arrays if name.startswith(AVERAGE)}
    if not source:
        fix = f"its names begin with {sorted({n.split('/')[0] for n in loaded.arrays})}"
        raise UserError(f"{loaded.path} has no model", fix)
    if selection.averaged and not average:
        raise UserError(f"{loaded.path} has no averaged weights", "set train.ema_decay, or export without --ema")
    if selection.averaged is not False:
        source |= {name: average[name] for name in source if name in average}
    if selection.trainable_only:
        trained = trained_names(loaded, source)
        source = {name: full for name, full in source.items() if name in trained}
    others = loaded.meta.get("other_names")
    for name, saved in others.items() if isinstance(others, dict) else ():  # loaders expect the names in ``state_dict``
        if isinstance(saved, str) and saved in source:
            source[name] = source[saved]
        elif saved == "":  # ``state_dict`` has others for it
            source.pop(name, None)
    weights = under_names(loaded.arrays, loaded.dtypes, source)
    if selection.lora_alpha is not None:
        weights = merge_lora(*weights, selection.lora_alpha)
    if selection.rename:
        weights = under_names(
            *weights, renamed({name: name for name in weights[0]}, selection.rename, str(loaded.path))
        )
    return weights


def trained_names(loaded: Loaded, names: Iterable[str]) -> set[str]:
    """Names of the weights that were trained. Raises UserError if the checkpoint does not record them."""
    trained = loaded.meta.get("trained", "unknown")
    if trained is not None and not isinstance(trained, list):
        fix = "export it without --trainable-only, or train it further for one step"
        raise UserError(f"{loaded.path} does not say which weights were trained: no training run saved it", fix)
    return set(names) if trained is None else {str(name).removeprefix(MODEL) for name in trained}


def export_safetensors(loaded: Loaded, path: Path, selection: Selection = WHOLE) -> None:
    """Write a .safetensors file. Raises UserError."""
    write_safetensors(*model_weights(loaded, selection), loaded.step, path)


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Suffixes of files with weights, or with an index of weights."""
ADAPTER = re.compile(r"(\.lora_\w+)\.[^.]+(\.weight)$")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MAX_FILE_BYTES = 5_000_000_000
"""Largest weight file of a folder, unless one weight is larger; several are read at a time."""


def export_folder(loaded: Loaded, folder: Path, like: Path, selection: Selection) -> Path:
    """Write ``model.safetensors``, or several files and their index if they are large, or ``adapter_model.safetensors``
    for only an adapter; and copy the rest of ``like``.

    Args:
        loaded: a checkpoint.
        folder: output folder; created if it does not exist.
        like: folder of the model (with config.json) or adapter (adapter_config.json) that was fine-tuned.
        selection: the weights to export. The adapter's name is removed from PEFT weights, as PEFT itself does.

    Returns:
        The path of the weight file, or of the index.

    Raises:
        UserError: ``like`` is not such a folder, or a file cannot be written.
    """
    needed = ADAPTER_CONFIG if selection.trainable_only else CONFIG
    if not (like / needed).is_file():
        raise UserError(f"{like} holds no {needed}", f"name the folder whose {needed} describes the model")
    if like.resolve() == folder.resolve():
        raise UserError(f"{like} holds the weights that were fine-tuned", "choose another --output")
    arrays, dtypes = model_weights(loaded, selection)
    if selection.trainable_only:
        # as in PEFT's files: ``X.lora_A.default.weight`` is ``X.lora_A.weight`` there
        names = {TRAINED_WHOLE.sub("", ADAPTER.sub(r"\1\2", name)): name for name in arrays}
        arrays, dtypes = under_names(arrays, dtypes, names)
    with file_errors(f"{folder} cannot be written", "choose another --output"):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(like.iterdir()):
            if file.is_file() and not file.name.endswith(WEIGHTS):
                shutil.copyfile(file, folder / file.name)
    if selection.trainable_only:
        path = folder / "adapter_model.safetensors"
        write_safetensors(arrays, dtypes, loaded.step, path)
        return path
    return write_model(arrays, dtypes, loaded.step, folder)


def write_model(arrays: SavedArrays, dtypes: Mapping[str, str], step: int, folder: Path) -> Path:
    """Write a model's weights as files for ``from_pretrained``; returns the path of the only file, or of the index.

    Removes what an earlier export left: loaders would prefer some of it, and the rest takes space.
    """
    whole = folder / "model.safetensors"
    sizes = {name: layout.TensorSpec(name, arrays.shape_of(name), dtypes[name]).num_bytes for name in arrays}
    parts = in_files(sizes, MAX_FILE_BYTES)
    if len(parts) == 1:
        write_safetensors(arrays, dtypes, step, whole)
        (folder / INDEX).unlink(missing_ok=True)
        remove_parts(folder, set())
        return whole
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        path = folder / f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_safetensors(*under_names(arrays, dtypes, {name: name for name in names}), step, path)
        weight_map |= dict.fromkeys(names, path.name)
    write_whole(folder / INDEX, [to_json({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})])
    whole.unlink(missing_ok=True)
    remove_parts(folder, set(weight_map.values()))
    return folder / INDEX


def remove_parts(folder: Path, keep: set[str]) -> None:
    """Removes the numbered weight files of earlier exports."""
    with file_errors(f"{folder} cannot be written", "choose another --output"):
        for path in folder.glob("model-[0-9]*-of-[0-9]*.safetensors"):
            if path.name not in keep:
                path.unlink()


def in_files(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names of weights, in order, in files of up to ``most`` bytes, or of one weight."""
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > most:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def write_safetensors(arrays: SavedArrays, dtypes: Mapping[str, str], step: int, path: Path) -> None:
    """Write weights to a .safetensors file. Raises UserError if one is complex."""
    complex_name = next((name for name, dtype in dtypes.items() if dtype.startswith("complex")), None)
    if complex_name:
        raise UserError(f"{complex_name} is complex, which safetensors does not know", "export to a .pt file")
    write_whole(path, safetensors.encode(arrays, dtypes, {"format": "pt", "step": str(step)}))


def export_state_dict(loaded: Loaded, path: Path, selection: Selection = WHOLE) -> None:
    """Write a file for ``model.load_state_dict(torch.load(path, weights_only=True))``. Raises UserError."""
    from hpctrain.backends.torch.state.tensors import tensor_over, write_weights

    arrays, dtypes = model_weights(loaded, selection)
    state: dict[str, Any] = {name: tensor_over(np.array(arrays[name]), dtypes[name]) for name in arrays}
    if not selection.trainable_only:
        state |= extra_state(loaded)
    replace_whole(path, partial(write_weights, state))


def extra_state(loaded: Loaded) -> dict[str, Any]:
    """The modules' extra state, under its keys in ``state_dict``. Raises UserError for NumPy arrays."""
    from hpctrain.backends.torch.state.tensors import ADDED_KEYS, tensor_over

    of_modules: dict[str, dict[str, str]] = {}
    for name in loaded.arrays:
        if name.startswith(EXTRA):
            module, _, part = name.removeprefix(EXTRA).rpartition("/")
            of_modules.setdefault(module, {})[part] = name

    def value(module: str, names: dict[str, str]) -> Any:
        def leaf(part: str, kind: str) -> Any:
            if kind == "bytes":
                return loaded.arrays[names[part]].tobytes()
            if kind == "number":
                return loaded.arrays[names[part]].item()
            if kind == "array":
                fix = "have get_extra_state return tensors, or export to a .safetensors file, which leaves it out"
                raise UserError(f"{keys[module]} holds NumPy arrays, which a .pt file cannot without a pickle", fix)
            return tensor_over(np.array(loaded.arrays[names[part]]), loaded.dtypes[names[part]])

        return put_together({part: loaded.arrays[name] for part, name in names.items()}, leaf, keys[module])

    keys = {module: "_extra_state" if module == "itself" else f"{module}._extra_state" for module in of_modules}
    found = {keys[module]: value(module, names) for module, names in of_modules.items()}
    added = found.pop(keys.get(ADDED_KEYS, ""), {})  # by an override, to ``state_dict``
    return {**found, **added}


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Replace a file atomically. Raises UserError if it cannot be written."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.writelines(parts)

    replace_whole(path, write)
