"""Weights as a PyTorch state_dict."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.backends.torch.state.tensors import tensor_over, write_weights
from hpctrain.checkpoint.exports.weights import WHOLE, Selection, model_weights, replace_whole
from hpctrain.checkpoint.reading import Loaded
from hpctrain.errors import UserError
from hpctrain.train.tree import put_together

EXTRA = "held/model/extra/"
"""Prefix of modules' extra state."""


def export_state_dict(loaded: Loaded, path: Path, selection: Selection = WHOLE) -> None:
    """Writes a file for ``model.load_state_dict(torch.load(path, weights_only=True))``. Raises UserError."""
    arrays, dtypes = model_weights(loaded, selection)
    state: dict[str, Any] = {name: tensor_over(np.array(arrays[name]), dtypes[name]) for name in arrays}
    if not selection.trainable_only:
        state |= extra_state(loaded)
    replace_whole(path, partial(write_weights, state))


def extra_state(loaded: Loaded) -> dict[str, Any]:
    """What modules gave as their extra state, under the keys of ``state_dict``. Raises UserError."""
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
