"""Merges LoRA adapters into the weights that they adapt (Hu et al. 2021, LoRA: Low-Rank Adaptation, section 4.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.train.saved_arrays import DerivedArrays, SavedArrays, as_saved, items_of, numbers_of

DOWN = re.compile(r"(?P<layer>.+)\.lora_A(?P<rest>(\.[^.]+)?(\.weight)?)")
"""Name of an adapter's first matrix in PEFT, and in custom layers that follow its naming."""
WRAPPER = "base_model.model."
"""Prefix of the names of a model wrapped by PEFT."""
FROZEN = ".base_layer."
"""Part of the name of a weight that has an adapter."""
TRAINED_WHOLE = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
"""Part of the name of a weight that PEFT trains as a whole, such as a head's."""
REPLACED = ".original_module."
"""Part of the name of the original that such a weight replaces."""
BY_HAND = "merge it in Python, with PEFT's merge_and_unload"
"""Advice for unsupported adapters."""


class Weights(NamedTuple):
    """Weights of a source, read on access."""

    arrays: SavedArrays
    """Arrays by name; bfloat16 as uint16."""
    dtypes: Mapping[str, str]
    """Logical types by name."""


def under_names(arrays: SavedArrays, dtypes: Mapping[str, str], names: Mapping[str, str]) -> Weights:
    """Rename weights; ``names`` maps each new name to the old one."""
    places = {new: (arrays, old) for new, old in names.items()}
    return Weights(DerivedArrays(places), {new: dtypes[old] for new, old in names.items()})


def without_adapters(name: str) -> str:
    """The name that a weight of a model with PyTorch adapters has in the plain network."""
    return TRAINED_WHOLE.sub("", name.removeprefix(WRAPPER).replace(FROZEN, ".")).replace(REPLACED, ".")


def merge_lora(weights: Mapping[str, Array], dtypes: Mapping[str, str], alpha: float) -> Weights:
    """Merge adapters of PyTorch linear layers, under the model's names without adapters: ``X.base_layer.weight``
    becomes ``X.weight``.

    Args:
        weights: ``X.base_layer.weight`` (out, in), ``X.lora_A`` (rank, in) and ``X.lora_B`` (out, rank), the latter two
            optionally followed by an adapter's name and ``.weight``; and weights without an adapter.
        dtypes: logical types by name.
        alpha: the result is ``base_layer + alpha / rank * lora_B @ lora_A``.

    Raises:
        UserError: there is no adapter, a weight has several, or one is of an unsupported kind.
    """
    arrays = as_saved(weights)
    adapters = adapters_in(arrays)
    if not adapters:
        what = "there is no LoRA adapter in it: no name holds .lora_A"
        raise UserError(what, "export it without --merge-lora; Keras merges its own in a .weights.h5 file")
    used = {name for matrices in adapters.values() for name in matrices}
    left = [name for name in arrays if ".lora_" in name and name not in used]
    if left:
        what = f"{left[0]} is an adapter that is not merged here: only one LoRA of a linear layer is"
        raise UserError(what, BY_HAND)
    names = {without_adapters(name): name for name in arrays if name not in used and REPLACED not in name}
    return under_names(MergedArrays(arrays, dtypes, adapters, alpha), dtypes, names)


def adapters_in(arrays: SavedArrays) -> dict[str, tuple[str, str]]:
    """Names of ``lora_B`` and ``lora_A`` by the weight that they adapt; raises UserError unless it is a linear one."""
    adapters = {}
    for match in filter(None, map(DOWN.fullmatch, arrays)):
        layer, down = match["layer"], match[0]
        up = f"{layer}.lora_B{match['rest']}"
        base = f"{layer}{FROZEN}weight"
        if up not in arrays or base not in arrays:
            raise UserError(f"{down} lacks {base if up in arrays else up}", "name the layers as PEFT does")
        tall, wide = arrays.shape_of(up), arrays.shape_of(down)
        if len(wide) != 2 or arrays.shape_of(base) != (tall[0], *wide[1:]):
            raise UserError(f"{down} does not adapt a linear layer", BY_HAND)
        adapters[base] = up, down
    return adapters


class MergedArrays(DerivedArrays):
    """Weights whose adapters are added on access."""

    def __init__(
        self, arrays: SavedArrays, dtypes: Mapping[str, str], adapters: Mapping[str, tuple[str, str]], alpha: float
    ) -> None:
        super().__init__({name: (arrays, name) for name in arrays})
        self.arrays = arrays
        self.dtypes = dtypes
        self.adapters = adapters
        self.alpha = alpha

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        own = self.arrays.part(name, begin, shape)
        if name not in self.adapters:
            return own
        up, down = self.adapters[name]
        rank = self.arrays.shape_of(down)[0]
        left = numbers_of(self.arrays.part(up, (begin[0], 0), (shape[0], rank)), self.dtypes[up])
        right = numbers_of(self.arrays.part(down, (0, begin[1]), (rank, shape[1])), self.dtypes[down])
        kind = np.result_type(left, right, numbers_of(own, self.dtypes[name]), np.float32)
        total = numbers_of(own, self.dtypes[name]) + kind.type(self.alpha / rank) * (left.astype(kind) @ right)
        return items_of(total, self.dtypes[name])
