"""A folder that ``from_pretrained`` of transformers or PEFT loads: weights, with the files of another such folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hpctrain.checkpoint.exports.lora import TRAINED_WHOLE
from hpctrain.checkpoint.exports.weights import Selection, model_weights, under_names, write_safetensors
from hpctrain.checkpoint.reading import Loaded
from hpctrain.errors import UserError, file_errors

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
