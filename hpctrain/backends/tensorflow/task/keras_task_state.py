"""Finds state that a Keras task keeps outside its model: in its optimizers, its loss and ``forward``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.backends.keras.keras_model import optimizers_in
from hpctrain.backends.tensorflow.state.keras_tensors import VariableTensor, optimizer_tensors
from hpctrain.errors import UserError
from hpctrain.train.state import ArrayTensor, Placement, StateTensor
from hpctrain.train.tree import Leaves
from hpctrain.train.walk_objects import reached

TENSORS = (tf.Tensor, tf.Variable, keras.Variable)


class KerasLeaves(Leaves):
    """Leaves plus TensorFlow tensors and variables, which are restored as tensors."""

    def kind(self, value: Any) -> str | None:
        if not isinstance(value, TENSORS):
            return super().kind(value)
        return f"tensor {tf.as_dtype(value.dtype).name}"

    def tensor(self, name: str, value: Any, placement: Placement) -> StateTensor:
        if not isinstance(value, TENSORS):
            return super().tensor(name, value, placement)
        array = np.asarray(value.numpy())
        if array.dtype == tf.bfloat16.as_numpy_dtype:
            return ArrayTensor(name, array.view(np.uint16), placement, logical_dtype="bfloat16")
        return ArrayTensor(name, array, placement)

    def value(self, kind: str, array: NDArray[Any]) -> Any:
        what, _, dtype = kind.partition(" ")
        if what != "tensor":
            return super().value(kind, array)
        if dtype == "bfloat16":
            return tf.constant(np.array(array).view(tf.bfloat16.as_numpy_dtype))
        return tf.constant(np.array(array))


VARIABLES = (keras.Variable, tf.Variable)
HOLDERS = (keras.Layer, keras.Metric)
"""Classes with a list of their variables."""
GENERATORS = (keras.random.SeedGenerator, tf.random.Generator)


def is_end(value: Any) -> bool:
    """Whether a value is a leaf, whose contents are not searched."""
    return isinstance(value, (*VARIABLES, *HOLDERS, *GENERATORS, tf.Tensor, np.ndarray))


@dataclass(eq=False)
class KerasTaskState:
    """Variables of a task's optimizer and those that it wraps, of the loss and of ``forward``."""

    optimizer: Any
    """The task's built optimizer, equal on all ranks; a dict of optimizers for a custom ``train_step``."""
    others: Mapping[str, Any]
    """Objects that process a rank's own samples, by name: the loss, ``forward``."""
    model: keras.Model
    """The model, whose variables are skipped."""
    known: Sequence[tf.Variable]
    """Further variables that are saved under other names."""
    apart: Iterable[Any] = ()
    """Objects that are saved under their own names: their contents are skipped."""

    def __post_init__(self) -> None:
        self.skipped = {id(each) for each in self.apart}
        self.made_with = {tensor.name for tensor in self.found()}

    def tensors(self) -> list[VariableTensor]:
        """All variables: ``optimizer/...`` and ``held/<loss, forward or optimizer>/<path>``.

        Raises:
            UserError: a variable was created after the start, so it would be missing at a resume.
        """
        found = self.found()
        late = [tensor.name for tensor in found if tensor.name not in self.made_with]
        if late:
            raise UserError(
                f"the variable {late[0]} was made by the first update, so a resumed run could not load it",
                "make it with the task: in a constructor, or in build of the optimizer and of those it wraps",
            )
        return found

    def found(self) -> list[VariableTensor]:
        """Finds each variable once."""
        seen = {id(native(variable)) for variable in (*self.model.variables, *self.known)}
        optimizers = optimizers_in(self.optimizer)
        of_optimizers = [each for path, one in optimizers.items() for each in self.of_optimizer(path, one)]
        saved = {id(each.value) for each in of_optimizers}
        seen |= {id(one.value) for each in optimizers.values() for one in each.variables if id(one.value) not in saved}
        everything = [
            *of_optimizers,
            *self.held("optimizer", self.optimizer, Placement.REPLICATED),
            *(each for name, value in self.others.items() for each in self.held(name, value, Placement.RANK)),
        ]
        found = []
        for tensor in everything:
            if id(tensor.value) not in seen:
                seen.add(id(tensor.value))
                found.append(tensor)
        return found

    def held(self, root: str, value: Any, placement: Placement) -> Iterator[VariableTensor]:
        """Variables in attributes, closures and globals of a value; weights of layers are replicated."""
        for path, each in reached(value, lambda each: is_end(each) or id(each) in self.skipped):
            for name, variable, is_weight in variables_of(path, each) if id(each) not in self.skipped else ():
                shared = Placement.REPLICATED if is_weight else placement
                dtype = native(variable).dtype
                if dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex:
                    kind = "rng/held" if isinstance(each, GENERATORS) else "held"
                    yield VariableTensor(f"{kind}/{root}/{name or 'itself'}", native(variable), shared)

    def of_optimizer(self, path: str, optimizer: keras.optimizers.Optimizer) -> list[VariableTensor]:
        """Variables of one optimizer, with its path as prefix."""
        return optimizer_tensors(optimizer, self.model, f"{path}." if path else "")

    def reseed(self, seed: int) -> None:
        """Reseeds the held random generators."""
        states = [tensor.value for tensor in self.tensors() if tensor.name.startswith("rng/held/")]
        for number, state in enumerate(states):
            words = np.random.SeedSequence([seed, number]).generate_state(int(np.prod(state.shape)), np.uint32)
            state.assign(tf.cast(words, state.dtype))


def native(variable: Any) -> Any:
    """The tf.Variable of a Keras variable; others are returned unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def variables_of(path: str, value: Any) -> list[tuple[str, Any, bool]]:
    """Lists (name, variable, whether it is a layer's weight) of a value at a path."""
    if isinstance(value, VARIABLES):
        return [(path, value, False)]
    if isinstance(value, GENERATORS):
        return [(f"{path}.state", value.state, False)]
    if not isinstance(value, HOLDERS):
        return []
    layers = value._flatten_layers() if isinstance(value, keras.Layer) else ()
    weights = {id(variable) for layer in layers for variable in layer._trainable_variables}
    prefix = f"{path}." if path else ""
    return [(f"{prefix}{index}.{one.name}", one, id(one) in weights) for index, one in enumerate(value.variables)]
