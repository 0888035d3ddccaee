"""A Keras model of blocks, in float64, on Keras' PyTorch backend, of which ranks may have rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops

from hpctrain import KerasTask

SAMPLES, WORDS, LENGTH, WIDTH = 75, 11, 5, 7
"""Sizes that divide by nothing."""


class Product(layers.Layer):
    """A Dense layer in float64, in which Keras itself multiplies no matrices on PyTorch."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = units

    def build(self, shape: Any) -> None:
        size = (self.units, shape[-1])
        self.kernel = self.add_weight(shape=size, initializer="glorot_uniform", regularizer="l2", name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="ones", name="bias")

    def call(self, inputs: Any) -> Any:
        return torch.nn.functional.linear(inputs, self.kernel.value, self.bias.value)


class Norm(layers.Layer):
    """A LayerNormalization in float64, in which Keras does not normalise either."""

    def build(self, shape: Any) -> None:
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones", name="gamma")

    def call(self, inputs: Any) -> Any:
        return torch.nn.functional.layer_norm(inputs, inputs.shape[-1:], self.gamma.value)


class Masked(layers.Layer):
    """Multiplies words that are there by a number, which all ranks have."""

    supports_masking = True

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs: Any, mask: Any = None) -> Any:
        return inputs * self.scale if mask is None else torch.where(mask[..., None], inputs * self.scale, 0.1)


class Block(layers.Layer):
    """Layers in a layer, which is called twice, adds a loss of its weights, and passes a mask on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True
        self.up, self.down = Product(3 * WIDTH, activity_regularizer=keras.regularizers.L2(0.1)), Product(WIDTH)
        self.norm, self.masked = Norm(), Masked()

    def build(self, shape: Any) -> None:
        for inner in (self.norm, self.masked, self.up):
            inner.build(shape)
        self.down.build((*shape[:-1], 3 * WIDTH))

    def call(self, inputs: Any) -> Any:
        found = inputs + self.down(torch.tanh(self.up(self.masked(inputs))))
        self.add_loss(0.01 * ops.sum(ops.square(self.down.kernel)))
        return self.norm(found)


def samples() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORDS, (SAMPLES, LENGTH)).astype(np.int32)
    return {"words": words, "y": rng.normal(size=(SAMPLES, 1)), "id": np.arange(SAMPLES)}


def error(outputs: Any, batch: Any) -> Any:
    return (outputs - batch["y"]).square().mean()


def numbered(dtype: str = "float64", optimizer: str = "AdamW") -> KerasTask:
    """A task on samples with an ``id``: a table with a mask, two blocks, one of them twice, a frozen layer, a model."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy(dtype)
    given = keras.Input((LENGTH,), dtype="int32", name="words")
    block = Block()
    hidden = block(Block()(block(layers.Embedding(WORDS, WIDTH, mask_zero=True)(given))))
    frozen = Product(WIDTH)
    hidden = frozen(hidden)
    frozen.trainable = False
    head = keras.Sequential([keras.Input((LENGTH, WIDTH)), layers.Flatten(), Product(9), Product(1)])
    own = getattr(keras.optimizers, optimizer)(1e-2)
    model = keras.Model(given, head(hidden))
    data = samples()
    return KerasTask(model, error, own, data, data, forward=lambda model, batch: model(batch["words"]))
