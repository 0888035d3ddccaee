"""Names and host copies of the variables of a Keras model and its optimizer."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from hpctrain.backends.keras.keras_model import flat, named_variables, path_in, slots_of
from hpctrain.backends.named_state import Assignable
from hpctrain.backends.named_state import digest as digest_of
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.train.state import Placement, part_of


class VariableTensor(Assignable):
    """A StateTensor over a tf.Variable."""

    @property
    def dtype(self) -> str:
        """Dtype of the variable, such as float32 or bfloat16."""
        return str(self.value.dtype.name)

    def copy_into(self, out: Array, begin: Sequence[int] = ()) -> None:
        np.copyto(out, self.host_view()[part_of(begin, out.shape)], casting="no")

    def host_view(self) -> Array:
        """Returns the value; on a CPU this is the variable's own memory, so read it before the next update."""
        value = self.value.read_value()
        value = np.asarray(value if self.shape else value.numpy())  # NumPy cannot convert a bfloat16 scalar
        return value.view(np.uint16) if self.value.dtype == tf.bfloat16 else value

    def assign(self, value: Array) -> None:
        """Assigns a host array in the format of ``copy_into``."""
        self.value.assign(self._native(value))

    @contextmanager
    def loading(self) -> Iterator[Callable[[Array, int], None]]:
        """Loads rows into new memory, which then becomes the variable's.

        After a slice assignment, TensorFlow would copy the whole variable at every later read.
        """
        self._replace(tf.zeros([0], self.value.dtype))  # frees the old memory for the next tensor
        with tf.device("CPU"):
            value = tf.raw_ops.Empty(shape=[math.prod(self.shape)], dtype=self.value.dtype)
        host = writable(value).reshape(self.shape)

        def load(rows: Array, first_row: int) -> None:
            target = host[first_row : first_row + len(rows)] if rows.ndim else host
            np.copyto(target, self._native(rows), casting="same_kind")

        try:
            yield load
        finally:
            self._replace(tf.reshape(value, self.shape))

    def _native(self, value: Array) -> Array:
        is_bfloat16 = self.value.dtype == tf.bfloat16
        return value.view(self.value.dtype.as_numpy_dtype) if is_bfloat16 else value

    def _replace(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.value.handle, value=value, validate_shape=False)


def writable(value: tf.Tensor) -> Array:
    """Returns a writable view of a new host tensor's memory, valid as long as the tensor exists."""
    view = np.asarray(value)
    memory = (ctypes.c_uint8 * view.nbytes).from_address(view.ctypes.data)
    return np.ndarray(view.shape, view.dtype, memoryview(memory))


def model_tensors(model: keras.Model, equal: Sequence[tf.Variable] = ()) -> list[VariableTensor]:
    """Returns the weights, statistics and random states of a model, trainable variables first.

    Variables that the forward pass changes (BatchNorm statistics, counters, seeds) are per rank, except those in
    ``equal``; frozen weights are replicated, as trained ones are.
    """
    shared = {id(variable) for variable in equal}
    return [
        VariableTensor(
            name,
            variable.value,
            Placement.REPLICATED if is_weight or id(variable.value) in shared else Placement.RANK,
            is_trained=variable.trainable,
        )
        for name, variable, is_weight in named_variables(model)
    ]


def optimizer_tensors(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, prefix: str = ""
) -> list[VariableTensor]:
    """Names an optimizer's variables ``optimizer/<slot>/<path of the weight>``, or ``optimizer/<name>`` for others.

    ``prefix`` precedes slots and names, to distinguish wrapped optimizers.
    """
    weights = {flat(variable.path): path_in(model, variable) for variable in model.trainable_variables}
    return [
        VariableTensor(f"optimizer/{prefix}{f'{slot}/{weights[weight]}' if weight else slot}", variable.value)
        for variable, slot, weight in slots_of(optimizer, list(weights))
    ]


def require_different_names(tensors: Sequence[VariableTensor]) -> None:
    """Raises UserError if two variables have the same name."""
    names = Counter(tensor.name for tensor in tensors)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UserError(
            f"{names[twice[0]]} variables of the Keras model or optimizer are called {twice[0]}",
            "give layers of the same model different names",
        )


def digest(tensors: Sequence[VariableTensor]) -> str:
    """Returns the hexadecimal SHA-256 of the values in order."""
    return digest_of(np.ascontiguousarray(tensor.host_view()) for tensor in tensors)
