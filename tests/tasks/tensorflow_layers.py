"""Every class in keras.layers that holds weights, in the smallest model that trains it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers
from numpy.typing import NDArray

from tests.support.sweep import code, numbers


@dataclass(frozen=True)
class Case:
    """A layer, or a few, between an input and an output."""

    shape: tuple[int, ...]
    """Shape of one sample."""
    make: Callable[[], Callable[[Any], Any]]
    """Returns a new layer, or a function that calls new layers."""
    below: int | None = None
    """Inputs are integers in [0, below); None: floats."""

    def model(self) -> keras.Model:
        """A new model with weights."""
        inputs = keras.Input(self.shape, dtype="float32" if self.below is None else "int64")
        return keras.Model(inputs, self.make()(inputs))

    def samples(self) -> NDArray[Any]:
        """Inputs of all batches."""
        return numbers(self.shape, self.below)


def attention(layer: Any) -> Callable[[Any], Any]:
    """Apply a layer that takes [query, value] to two projections of sequences."""
    return lambda inputs: layer([layers.Dense(4)(inputs), layers.Dense(4)(inputs)])


def self_attention(layer: Any) -> Callable[[Any], Any]:
    """Apply a layer that takes query and value to sequences."""
    return lambda inputs: layer(inputs, inputs)


def there_and_back(inputs: Any) -> Any:
    """Map token indices to vectors, and vectors to logits over tokens, with the same matrix."""
    layer = layers.ReversibleEmbedding(7, 3)
    return layer(layers.Dense(3)(layer(inputs)), reverse=True)


def normalized(inputs: Any) -> Any:
    """Normalise with the statistics of data seen before."""
    layer = layers.Normalization()
    layer.adapt(numbers((4,)))
    return layers.Dense(3)(layer(inputs))


def spectrum(inputs: Any) -> Any:
    """Compute a spectrogram of a signal, followed by a dense layer."""
    return layers.Dense(2)(layers.STFTSpectrogram("real", 16, 8, 16)(inputs))


IMAGES, VOLUMES, SEQUENCES = (5, 5, 2), (4, 4, 4, 2), (5, 4)

CASES = {
    "AdditiveAttention": Case(SEQUENCES, lambda: attention(layers.AdditiveAttention())),
    "Attention": Case(SEQUENCES, lambda: attention(layers.Attention(use_scale=True, score_mode="concat"))),
    "BatchNormalization": Case((4,), layers.BatchNormalization),
    "Bidirectional": Case(SEQUENCES, lambda: layers.Bidirectional(layers.GRU(3))),
    "Conv1D": Case(SEQUENCES, lambda: layers.Conv1D(3, 2)),
    "Conv1DTranspose": Case(SEQUENCES, lambda: layers.Conv1DTranspose(3, 2)),
    "Conv2D": Case(IMAGES, lambda: layers.Conv2D(3, 2)),
    "Conv2DTranspose": Case(IMAGES, lambda: layers.Conv2DTranspose(3, 2)),
    "Conv3D": Case(VOLUMES, lambda: layers.Conv3D(3, 2)),
    "Conv3DTranspose": Case(VOLUMES, lambda: layers.Conv3DTranspose(3, 2)),
    "ConvLSTM1D": Case((3, 5, 2), lambda: layers.ConvLSTM1D(2, 2)),
    "ConvLSTM2D": Case((3, 4, 4, 2), lambda: layers.ConvLSTM2D(2, 2)),
    "ConvLSTM3D": Case((2, 3, 3, 3, 1), lambda: layers.ConvLSTM3D(2, 2)),
    "Dense": Case((4,), lambda: layers.Dense(3, "tanh")),
    "Dense over more axes": Case((2, 3, 4), lambda: layers.Dense(3)),
    "DepthwiseConv1D": Case(SEQUENCES, lambda: layers.DepthwiseConv1D(2)),
    "DepthwiseConv2D": Case(IMAGES, lambda: layers.DepthwiseConv2D(2)),
    "EinsumDense": Case(SEQUENCES, lambda: layers.EinsumDense("abc,cd->abd", (None, 3), bias_axes="d")),
    "Embedding": Case((5,), lambda: layers.Embedding(7, 3), below=7),
    "GRU": Case(SEQUENCES, lambda: layers.GRU(3)),
    "GRUCell": Case(SEQUENCES, lambda: layers.RNN(layers.GRUCell(3))),
    "GroupNormalization": Case(SEQUENCES, lambda: layers.GroupNormalization(2)),
    "GroupQueryAttention": Case(SEQUENCES, lambda: self_attention(layers.GroupQueryAttention(3, 4, 2))),
    "LSTM": Case(SEQUENCES, lambda: layers.LSTM(3)),
    "LSTMCell": Case(SEQUENCES, lambda: layers.RNN(layers.LSTMCell(3))),
    "LayerNormalization": Case(SEQUENCES, layers.LayerNormalization),
    "MultiHeadAttention": Case(SEQUENCES, lambda: self_attention(layers.MultiHeadAttention(2, 3))),
    "Normalization": Case((4,), lambda: normalized),
    "PReLU": Case((4,), layers.PReLU),
    "RMSNormalization": Case(SEQUENCES, layers.RMSNormalization),
    "RNN": Case(SEQUENCES, lambda: layers.RNN([layers.SimpleRNNCell(3), layers.SimpleRNNCell(2)])),
    "ReversibleEmbedding": Case((5,), lambda: there_and_back, below=7),
    "STFTSpectrogram": Case((64, 1), lambda: spectrum),
    "SeparableConv1D": Case(SEQUENCES, lambda: layers.SeparableConv1D(3, 2)),
    "SeparableConv2D": Case(IMAGES, lambda: layers.SeparableConv2D(3, 2)),
    "SimpleRNN": Case(SEQUENCES, lambda: layers.SimpleRNN(3)),
    "SimpleRNNCell": Case(SEQUENCES, lambda: layers.RNN(layers.SimpleRNNCell(3))),
    "SpectralNormalization": Case((4,), lambda: layers.SpectralNormalization(layers.Dense(3))),
    "StackedRNNCells": Case(
        SEQUENCES, lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.LSTMCell(2)]))
    ),
    "TimeDistributed": Case(SEQUENCES, lambda: layers.TimeDistributed(layers.Dense(3))),
}
"""Cases by class; a name with more words is a second case of its class."""

LEFT_OUT = {
    "FlaxLayer": "needs JAX",
    "IntegerLookup": "holds tables, which nothing trains",
    "JaxLayer": "needs JAX",
    "StringLookup": "takes texts, and data sets hold numbers",
    "TFSMLayer": "reads a saved model",
    "TorchModuleWrapper": "needs Keras on PyTorch",
    "Wrapper": "is a base of layers, and cannot be called",
}
"""Classes that the sweep leaves out, and why."""

HOLDS_WEIGHTS = re.compile(r"add_weight|Variable\(|Dense\(|self\.(forward_)?layer\b|self\.cells?\b")


def with_weights() -> set[str]:
    """Names of all classes in keras.layers whose code makes weights or holds a layer; one name for each class."""
    found = {cls: name for name, cls in sorted(vars(layers).items(), reverse=True) if inspect.isclass(cls)}
    return {
        name
        for cls, name in found.items()
        if issubclass(cls, layers.Layer) and HOLDS_WEIGHTS.search(code(cls, layers.Layer))
    } - LEFT_OUT.keys()
