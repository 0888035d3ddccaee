"""Names and host copies of the variables of a Keras model and its optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.errors import UserError
from hpctrain.frameworks.named_state import digest as digest_of
from hpctrain.parallel.tensorflow_sharded import flat, slots_of
from hpctrain.train.state import Cut, Placement, Tiling, part_of


@dataclass(frozen=True)
class VariableTensor:
    """A StateTensor over a tf.Variable."""

    name: str
    variable: tf.Variable
    placement: Placement = Placement.REPLICATED
    is_trained: bool = False
    cut: Cut | None = None
    tiling: Tiling | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the variable."""
        return tuple(self.variable.shape)

    @property
    def dtype(self) -> str:
        """Logical dtype."""
        return str(self.variable.dtype.name)

    def copy_into(self, out: NDArray[Any], begin: Sequence[int] = ()) -> None:
        np.copyto(out, self.host_view()[part_of(begin, out.shape)], casting="no")

    def host_view(self) -> NDArray[Any]:
        """The value; on a CPU the variable's own memory, so read it before the next update."""
        value = np.asarray(self.variable.read_value())
        return value.view(np.uint16) if self.variable.dtype == tf.bfloat16 else value

    def assign(self, value: NDArray[Any], first_row: int = 0) -> None:
        """Takes over a host array as ``copy_into`` gives it."""
        native = self.variable.dtype.as_numpy_dtype
        items = np.asarray(value).view(native) if self.variable.dtype == tf.bfloat16 else value
        if value.shape == self.shape:
            self.variable.assign(items)
        else:
            self.variable[first_row : first_row + len(value)].assign(items)


def model_tensors(model: keras.Model, equal: Sequence[tf.Variable] = ()) -> list[VariableTensor]:
    """Weights, statistics and random states of a model, trainable variables first.

    ``equal`` names statistics that are equal on all ranks.

    What the forward pass itself changes (BatchNorm statistics, counters, seeds) is each rank's own; frozen weights are
    replicated as trained ones are.
    """
    frozen = {id(variable.value) for layer in model._flatten_layers() for variable in layer._trainable_variables}
    replicated = frozen | {id(variable) for variable in equal}
    tensors = [
        VariableTensor(f"model/{path_in(model, variable)}", variable.value, is_trained=True)
        for variable in model.trainable_variables
    ]
    for variable in model.non_trainable_variables:
        group = "rng" if is_seed(variable) else "model"
        placement = Placement.REPLICATED if id(variable.value) in replicated else Placement.RANK
        tensors.append(VariableTensor(f"{group}/{path_in(model, variable)}", variable.value, placement))
    return tensors


@dataclass(frozen=True)
class OwnSlots:
    """Where an optimizer's state lies in that of whole weights, if it has rows of some of them alone."""

    cuts: Mapping[str, Cut]
    """Of the rows that it has of each weight, by its flat path."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of these rows."""
    common: frozenset[str]
    """Slots that have no rows."""
    nothing: str
    """Flat path of what is no weight of the model."""

    def placed(self, tensor: VariableTensor, slot: str, weight: str) -> list[VariableTensor]:
        """A slot of a weight as this rank saves it; nothing if another one does."""
        if weight == self.nothing:
            return []
        cut = self.cuts[weight]
        if tensor.shape == self.shapes[weight] and slot not in self.common:
            return [replace(tensor, placement=Placement.CUT, cut=cut)]
        if any(cut.begin):  # whoever has the first row saves what has none
            return []
        return [replace(tensor, placement=Placement.CUT, cut=Cut(tensor.shape, (0,) * len(tensor.shape)))]


def optimizer_tensors(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, prefix: str = "", own: OwnSlots | None = None
) -> list[VariableTensor]:
    """``optimizer/<slot>/<path of the weight>`` and ``optimizer/<name>`` for what belongs to no weight.

    Slots and names begin with a prefix, by which optimizers that one optimizer wraps differ. ``own`` says what this
    rank's optimizer has if its weights are shared out.
    """
    weights = {flat(variable.path): path_in(model, variable) for variable in model.trainable_variables}
    weights |= {} if own is None else {own.nothing: own.nothing}
    tensors = []
    for variable, slot, weight in slots_of(optimizer, list(weights)):
        name = f"{slot}/{weights[weight]}" if weight else slot
        tensor = VariableTensor(f"optimizer/{prefix}{name}", variable.value)
        tensors += [tensor] if own is None or not weight else own.placed(tensor, slot, weight)
    return tensors


def path_in(model: keras.Model, variable: keras.Variable) -> str:
    """Path of a variable without the model's own name, which Keras puts before some paths and not before others."""
    return str(variable.path).removeprefix(f"{model.name}/")


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a keras.random.SeedGenerator."""
    return bool(variable.name == "seed_generator_state")


def require_different_names(tensors: Sequence[VariableTensor]) -> None:
    """Raises UserError if two variables have one name."""
    names = Counter(tensor.name for tensor in tensors)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UserError(
            f"{names[twice[0]]} variables of the Keras model or optimizer are called {twice[0]}",
            "give layers of the same model different names",
        )


def digest(tensors: Sequence[VariableTensor]) -> str:
    """SHA-256 over the values in order, hexadecimal."""
    return digest_of(np.ascontiguousarray(tensor.host_view()) for tensor in tensors)
