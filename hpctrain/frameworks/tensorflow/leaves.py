"""Tensors and variables in the state of objects."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.train.state import ArrayTensor, Placement, StateTensor
from hpctrain.train.tree import HostLeaves

TENSORS = (tf.Tensor, tf.Variable, keras.Variable)


class KerasLeaves(HostLeaves):
    """TensorFlow's tensors and variables as well; they come back as tensors."""

    def kind(self, value: Any) -> str | None:
        if not isinstance(value, TENSORS):
            return super().kind(value)
        return f"tensor {tf.as_dtype(value.dtype).name}"

    def tensor(self, name: str, value: Any, placement: Placement) -> StateTensor:
        if not isinstance(value, TENSORS):
            return super().tensor(name, value, placement)
        array = np.asarray(value.numpy())
        if array.dtype == tf.bfloat16.as_numpy_dtype:
            return ArrayTensor(name, array.view(np.uint16), placement, "bfloat16")
        return ArrayTensor(name, array, placement)

    def value(self, kind: str, array: NDArray[Any]) -> Any:
        what, _, dtype = kind.partition(" ")
        if what != "tensor":
            return super().value(kind, array)
        if dtype == "bfloat16":
            return tf.constant(np.array(array).view(tf.bfloat16.as_numpy_dtype))
        return tf.constant(np.array(array))
