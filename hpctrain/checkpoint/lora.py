"""Merges LoRA adapters into the weights that they adapt (Hu et al. 2021, LoRA: Low-Rank Adaptation, section 4.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.layout import converted
from hpctrain.errors import UserError
from hpctrain.train.saved_arrays import DerivedArrays, SavedArrays, as_saved

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
KERAS = re.compile(r"(?P<layer>(.+/)?)lora_(?P<weight>kernel|embeddings)_a")
"""Name of an adapter's first matrix, as given by Keras's ``enable_lora``."""
BY_HAND = {
    False: "merge it in Python, with PEFT's merge_and_unload",
    True: "merge it in Python: layer.kernel is what a Keras layer computes with",
}
"""Advice for unsupported adapters, by whether they are from Keras."""


class Weights(NamedTuple):
    """Weights of a source, read on access."""

    arrays: SavedArrays
    """Arrays by name; bfloat16 as uint16."""
    dtypes: Mapping[str, str]
    """Logical types by name."""


@dataclass(frozen=True)
class Adapter:
    """Names of the matrices whose product, [..., rank] @ [rank, last], is added to a weight."""

    left: str
    right: str


def under_names(arrays: SavedArrays, dtypes: Mapping[str, str], names: Mapping[str, str]) -> Weights:
    """Rename weights; ``names`` maps each new name to the old one."""
    places = {new: (arrays, old) for new, old in names.items()}
    return Weights(DerivedArrays(places), {new: dtypes[old] for new, old in names.items()})


def without_adapters(name: str) -> str:
    """The name that a weight of a model with PyTorch adapters has in the plain network."""
    return TRAINED_WHOLE.sub("", name.removeprefix(WRAPPER).replace(FROZEN, ".")).replace(REPLACED, ".")


def merge_lora(weights: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str], alpha: float) -> Weights:
    """Merge adapters, under the model's names without adapters: ``X.base_layer.weight`` becomes ``X.weight``.

    Args:
        weights: from PEFT, ``X.base_layer.weight`` (out, in), ``X.lora_A`` (rank, in) and ``X.lora_B`` (out, rank), the
            latter two optionally followed by an adapter's name and ``.weight``; from Keras, ``X/kernel`` (..., out),
            ``X/lora_kernel_a`` (..., rank) and ``X/lora_kernel_b`` (rank, out), or the same for ``embeddings``; and
            weights without an adapter.
        dtypes: logical types by name.
        alpha: the result is ``base_layer + alpha / rank * lora_B @ lora_A``, or ``kernel + alpha / rank * a @ b``.

    Raises:
        UserError: there is no adapter, a weight has several, or one is of an unsupported kind.
    """
    arrays = as_saved(weights)
    adapters = peft_adapters(arrays) or keras_adapters(arrays, dtypes)
    if not adapters:
        what = "there is no LoRA adapter in it: no name holds .lora_A, lora_kernel_a or lora_embeddings_a"
        raise UserError(what, "export it without --merge-lora")
    used = {name for adapter in adapters.values() for name in (adapter.left, adapter.right)}
    left = [name for name in arrays if re.search(r"[./]lora_", name) and name not in used]
    if left:
        fix = BY_HAND["/" in left[0]]
        raise UserError(f"{left[0]} is an adapter that is not merged here: only one LoRA of a linear layer is", fix)
    names = {without_adapters(name): name for name in arrays if name not in used and REPLACED not in name}
    return under_names(MergedArrays(arrays, dtypes, adapters, alpha), dtypes, names)


def peft_adapters(arrays: SavedArrays) -> dict[str, Adapter]:
    """Adapters of PyTorch linear layers, by the weight they adapt. Raises UserError for adapters of other layers."""
    adapters: dict[str, Adapter] = {}
    pairs = {match["layer"]: match for name in arrays if (match := DOWN.fullmatch(name))}
    for layer, match in pairs.items():
        down, up, base = match[0], f"{layer}.lora_B{match['rest']}", f"{layer}{FROZEN}weight"
        if up not in arrays or base not in arrays:
            raise UserError(f"{down} lacks {base if up in arrays else up}", "name the layers as PEFT does")
        tall, wide = arrays.shape_of(up), arrays.shape_of(down)
        if len(wide) != 2 or arrays.shape_of(base) != (tall[0], *wide[1:]):
            raise UserError(f"{down} does not adapt a linear layer", BY_HAND[False])
        adapters[base] = Adapter(up, down)
    return adapters


def keras_adapters(arrays: SavedArrays, dtypes: Mapping[str, str]) -> dict[str, Adapter]:
    """Adapters of Keras's ``enable_lora``, by the weight they adapt.

    Convolutions are multiplied over their last axis, like dense layers. Raises UserError for quantized weights.
    """
    adapters: dict[str, Adapter] = {}
    for match in filter(None, map(KERAS.fullmatch, arrays)):
        left, base = match[0], match["layer"] + match["weight"]
        right = f"{left.removesuffix('a')}b"
        if right not in arrays or base not in arrays:
            fix = "name the weights as enable_lora does"
            raise UserError(f"{left} lacks {base if right in arrays else right}", fix)
        shapes = arrays.shape_of(left)[:-1] + arrays.shape_of(right)[1:]
        if arrays.shape_of(base) != shapes or "int" in dtypes[base]:
            raise UserError(f"{left} adapts {base}, which is quantized or has another shape", BY_HAND[True])
        adapters[base] = Adapter(left, right)
    return adapters


class MergedArrays(DerivedArrays):
    """Weights whose adapters are added on access."""

    def __init__(
        self, arrays: SavedArrays, dtypes: Mapping[str, str], adapters: Mapping[str, Adapter], alpha: float
    ) -> None:
        super().__init__({name: (arrays, name) for name in arrays})
        self.arrays = arrays
        self.dtypes = dtypes
        self.adapters = adapters
        self.alpha = alpha

    def __getitem__(self, name: str) -> NDArray[Any]:
        shape = self.shape_of(name)
        return self.part(name, (0,) * len(shape), shape)

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        own = self.arrays.part(name, begin, shape)
        if name not in self.adapters:
            return own
        adapter = self.adapters[name]
        rank, _ = self.arrays.shape_of(adapter.right)
        left = self.arrays.part(adapter.left, (*begin[:-1], 0), (*shape[:-1], rank))
        right = self.arrays.part(adapter.right, (0, begin[-1]), (rank, shape[-1]))
        product = converted(left, self.dtypes[adapter.left], "float32") @ converted(
            right, self.dtypes[adapter.right], "float32"
        )
        total = converted(own, self.dtypes[name], "float32") + np.float32(self.alpha / rank) * product
        return converted(total, "float32", self.dtypes[name])
