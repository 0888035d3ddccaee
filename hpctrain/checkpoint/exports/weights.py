"""Weights of a checkpoint for other programs: files of safetensors and of PyTorch, folders for ``from_pretrained``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.exports import safetensors
from hpctrain.checkpoint.exports.lora import TRAINED_WHOLE, Weights, merge_lora, under_names
from hpctrain.checkpoint.initial_match import renamed
from hpctrain.checkpoint.reading import Loaded
from hpctrain.errors import UserError, file_errors
from hpctrain.system.files import replace_whole
from hpctrain.train.saved_arrays import SavedArrays
from hpctrain.train.tree import put_together

MODEL = "model/"
"""Prefix of the model's parameters and buffers in a checkpoint."""
AVERAGE = "ema/"
"""Prefix of moving averages of parameters."""
EXTRA = "held/model/extra/"
"""Prefix of modules' extra state."""


@dataclass(frozen=True)
class Selection:
    """Which weights of a checkpoint are exported, and under which names."""

    averaged: bool = False
    """Take the moving average if a weight has one."""
    trainable_only: bool = False
    """Leave out frozen weights, and buffers: what remains is the adapter."""
    lora_alpha: float | None = None
    """Add LoRA adapters to the weights they adapt, times this number over their rank."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Replacements of name prefixes."""


WHOLE = Selection()


def model_weights(loaded: Loaded, selection: Selection = WHOLE) -> Weights:
    """The model's arrays and logical types, by name without ``model/``.

    Raises:
        UserError: there are no weights, no average, or nothing that ``selection`` could be applied to.
    """
    averaged = selection.averaged
    source = {name.removeprefix(MODEL): name for name in loaded.arrays if name.startswith(MODEL)}
    average = {name.removeprefix(AVERAGE): name for name in loaded.arrays if name.startswith(AVERAGE)}
    if not source:
        raise UserError(
            f"{loaded.path} has no model", f"its names begin with {sorted({n.split('/')[0] for n in loaded.arrays})}"
        )
    if averaged and not average:
        raise UserError(f"{loaded.path} has no averaged weights", "set train.ema_decay, or export without --ema")
    if averaged:
        source |= {name: average[name] for name in source if name in average}
    others = loaded.meta.get("other_names")
    for name, saved in others.items() if isinstance(others, dict) else ():  # tied weights: stock loaders want each name
        if isinstance(saved, str) and saved in source:
            source[name] = source[saved]
    if selection.trainable_only:
        trained = trained_names(loaded, source)
        source = {name: full for name, full in source.items() if name in trained}
    weights = under_names(loaded.arrays, loaded.dtypes, source)
    if selection.lora_alpha is not None:
        weights = merge_lora(*weights, selection.lora_alpha)
    if selection.rename:
        weights = under_names(
            *weights, renamed({name: name for name in weights[0]}, selection.rename, str(loaded.path))
        )
    return weights


def trained_names(loaded: Loaded, names: Iterable[str]) -> set[str]:
    """Those of the model's weights that were trained."""
    trained = loaded.meta.get("trained", "unknown")
    if trained is not None and not isinstance(trained, list):
        raise UserError(
            f"{loaded.path} does not say which weights were trained: an earlier version saved it",
            "export it without --trainable-only, or train it further for one step",
        )
    return set(names) if trained is None else {str(name).removeprefix(MODEL) for name in trained}


def export_safetensors(loaded: Loaded, path: Path, selection: Selection = WHOLE) -> None:
    """Writes a .safetensors file. Raises UserError."""
    write_safetensors(*model_weights(loaded, selection), loaded.step, path)


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Name endings of files with weights, or with an index of them."""
ADAPTER = re.compile(r"(\.lora_\w+)\.[^.]+(\.weight)$")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


def export_folder(loaded: Loaded, folder: Path, like: Path, selection: Selection) -> Path:
    """Writes ``model.safetensors`` or, of an adapter alone, ``adapter_model.safetensors``, and copies the rest.

    Args:
        loaded: a checkpoint.
        folder: created if it does not exist.
        like: folder of the model (with config.json) or adapter (adapter_config.json) that was fine-tuned.
        selection: of weights. Those of PEFT lose the adapter's name, as in the files that PEFT writes.

    Returns:
        The file of weights.

    Raises:
        UserError: ``like`` is not such a folder, or something cannot be written.
    """
    needed = ADAPTER_CONFIG if selection.trainable_only else CONFIG
    if not (like / needed).is_file():
        raise UserError(f"{like} holds no {needed}", f"name the folder whose {needed} describes the model")
    if like.resolve() == folder.resolve():
        raise UserError(f"{like} holds the weights that were fine-tuned", "choose another --output")
    arrays, dtypes = model_weights(loaded, selection)
    if selection.trainable_only:
        # as PEFT's files have them: ``X.lora_A.default.weight`` is ``X.lora_A.weight`` there
        names = {TRAINED_WHOLE.sub("", ADAPTER.sub(r"\1\2", name)): name for name in arrays}
        arrays, dtypes = under_names(arrays, dtypes, names)
    path = folder / ("adapter_model.safetensors" if selection.trainable_only else "model.safetensors")
    with file_errors(f"{folder} cannot be written", "choose another --output"):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(like.iterdir()):
            if file.is_file() and not file.name.endswith(WEIGHTS):
                shutil.copyfile(file, folder / file.name)
    write_safetensors(arrays, dtypes, loaded.step, path)
    return path


def write_safetensors(arrays: SavedArrays, dtypes: Mapping[str, str], step: int, path: Path) -> None:
    """The same, of weights by name."""
    complex_name = next((name for name, dtype in dtypes.items() if dtype.startswith("complex")), None)
    if complex_name:
        raise UserError(f"{complex_name} is complex, which safetensors does not know", "export to a .pt file")
    write_whole(path, safetensors.encode(arrays, dtypes, {"format": "pt", "step": str(step)}))


def export_state_dict(loaded: Loaded, path: Path, selection: Selection = WHOLE) -> None:
    """Writes a file for ``model.load_state_dict(torch.load(path, weights_only=True))``. Raises UserError."""
    from hpctrain.backends.torch.state.tensors import tensor_over, write_weights

    arrays, dtypes = model_weights(loaded, selection)
    state: dict[str, Any] = {name: tensor_over(np.array(arrays[name]), dtypes[name]) for name in arrays}
    if not selection.trainable_only:
        state |= extra_state(loaded)
    replace_whole(path, partial(write_weights, state))


def extra_state(loaded: Loaded) -> dict[str, Any]:
    """What modules gave as their extra state, under the keys of ``state_dict``. Raises UserError."""
    from hpctrain.backends.torch.state.tensors import tensor_over

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
                raise UserError(
                    f"{keys[module]} holds NumPy arrays, which a .pt file cannot without a pickle",
                    "have get_extra_state return tensors, or export to a .safetensors file, which leaves it out",
                )
            return tensor_over(np.array(loaded.arrays[names[part]]), loaded.dtypes[names[part]])

        return put_together({part: loaded.arrays[name] for part, name in names.items()}, leaf, keys[module])

    keys = {module: "_extra_state" if module == "itself" else f"{module}._extra_state" for module in of_modules}
    return {keys[module]: value(module, names) for module, names in of_modules.items()}


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file atomically. Raises UserError if it cannot be written."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.writelines(parts)

    replace_whole(path, write)
