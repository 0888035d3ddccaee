"""LoRA adapters added to the weights that they adapt (Hu et al. 2021, LoRA: Low-Rank Adaptation, section 4.1)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.conversion import converted
from hpctrain.errors import UserError

DOWN = re.compile(r"(?P<layer>.+)\.lora_A(?P<rest>(\.[^.]+)?(\.weight)?)")
"""As PEFT names the first matrix of an adapter, and a layer of one's own may."""
WRAPPER = "base_model.model."
"""Begins the names of a model that PEFT has wrapped."""
FROZEN = ".base_layer."
"""Stands in the name of a weight that has an adapter beside it."""
TRAINED_WHOLE = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
"""Stands in the name of a weight that PEFT trains whole, such as a head's."""
REPLACED = ".original_module."
"""Stands in the name of what such a weight takes the place of."""


def merge_lora(
    arrays: dict[str, NDArray[Any]], dtypes: dict[str, str], alpha: float
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Weights under the names that the model has without adapters: ``X.base_layer.weight`` becomes ``X.weight``.

    Args:
        arrays: ``X.base_layer.weight`` (out, in), ``X.lora_A`` (rank, in), ``X.lora_B`` (out, rank), both also with
            ``.weight`` or an adapter's name and ``.weight`` behind; and weights without an adapter.
        dtypes: logical types.
        alpha: the sum is ``base_layer + alpha / rank * lora_B @ lora_A``.

    Raises:
        UserError: there is no adapter, there are several for one weight, or one is of another kind.
    """
    pairs = {match["layer"]: match for name in arrays if (match := DOWN.fullmatch(name))}
    if not pairs:
        raise UserError("there is no LoRA adapter in it: no name holds .lora_A", "export it without --merge-lora")
    merged, used = dict(arrays), set()
    for layer, match in pairs.items():
        down, up, base = match[0], f"{layer}.lora_B{match['rest']}", f"{layer}{FROZEN}weight"
        if up not in arrays or base not in arrays:
            raise UserError(f"{down} has no {base if up in arrays else up} beside it", "name the layers as PEFT does")
        shapes = arrays[base].shape, (arrays[up].shape[0], *arrays[down].shape[1:])
        if arrays[down].ndim != 2 or shapes[0] != shapes[1]:
            raise UserError(f"{down} does not adapt a linear layer", "merge it in Python, with PEFT's merge_and_unload")
        factors = [converted(arrays[name], dtypes[name], "float32") for name in (base, up, down)]
        total = factors[0] + np.float32(alpha / len(arrays[down])) * (factors[1] @ factors[2])
        merged[base] = converted(total, "float32", dtypes[base])
        used |= {down, up}
    left = [name for name in arrays if ".lora_" in name and name not in used]
    if left:
        raise UserError(
            f"{left[0]} is an adapter that is not merged here: only one LoRA of a linear layer is",
            "merge it in Python, with PEFT's merge_and_unload",
        )
    names = {
        name: TRAINED_WHOLE.sub("", name.removeprefix(WRAPPER).replace(FROZEN, "."))
        for name in arrays
        if name not in used and REPLACED not in name
    }
    return {new: merged[old] for old, new in names.items()}, {new: dtypes[old] for old, new in names.items()}
