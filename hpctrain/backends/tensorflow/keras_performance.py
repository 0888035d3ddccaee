"""Counts a Keras model's operations in the graph of one forward pass, and measures the device's peak rate.

Runs only at the start. ``backends.torch.performance`` is the counterpart for PyTorch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from hpctrain.backends.tensorflow.steps.passes import KerasPasses, Tensors, converted
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.flops import CPU_SIZE, GPU_SIZE, Flops, peak_per_s

PRODUCTS = re.compile("MatMul|Conv|Einsum|RNN|LSTM|GRU|Dot|PyFunc")
"""Matches types of operations that do, or may do, many multiplications."""


class Unknown(Exception):
    """The cost of an operation is unknown."""


def training_flops(task: KerasTask, passes: KerasPasses, batch: Tensors) -> Flops | None:
    """Operations of training on a sample, as three times those of a forward pass.

    The model and its loss are traced once more; nothing is computed.

    Args:
        task: the task.
        passes: its passes.
        batch: some samples.

    Returns:
        None if unknown: products in loops (recurrent layers), in nested functions (grouped convolutions on CPUs) or in
        Python; shapes unknown to the graph; frozen weights.
    """
    samples = next(iter(batch.values())).shape[0]
    if not samples or any(len(one.shape) > 1 for one in task.model.non_trainable_variables):
        return None

    def forward(tensors: Tensors) -> None:
        outputs = passes.outputs(tensors, training=True)
        if task.loss is not None:
            converted(task.loss)(outputs, tensors)

    try:
        graph = tf.function(forward, autograph=False).get_concrete_function(dict(batch)).graph
        taken = [(operations(one), one.inputs[0].dtype) for one in graph.get_operations() if PRODUCTS.search(one.type)]
        inner = [node.op for function in graph.as_graph_def().library.function for node in function.node_def]
        if any(map(PRODUCTS.search, inner)) or not taken:
            return None
        per_sample = 3 * sum(count for count, _ in taken) / samples
        return Flops(per_sample, device_peak(max(taken, key=lambda one: one[0])[1]))
    except Exception:  # must never stop a training; the dry call reports errors of the task
        return None


def operations(one: tf.Operation) -> int:
    """Multiplications and additions of an operation. Raises Unknown."""
    count = COUNTS.get(one.type)
    if count is None:
        raise Unknown(one.type)
    return 2 * count(one)


def matrices(one: tf.Operation) -> int:
    """Multiplications of a product of two matrices, or of two stacks of matrices."""
    is_turned = one.get_attr("transpose_a" if one.type == "MatMul" else "adj_x")
    return elements(one.outputs[0].shape) * elements(one.inputs[0].shape[-2 if is_turned else -1 :][:1])


def convolution(one: tf.Operation, axes: int = -1) -> int:
    """Multiplications of a convolution: outputs times filter size (all axes but the last, for any number of groups;
    the first two if it is depthwise)."""
    return elements(one.outputs[0].shape) * elements(one.inputs[1].shape[:axes])


def transposed(one: tf.Operation) -> int:
    """Multiplications of a transposed convolution, whose inputs are the outputs of the convolution."""
    return elements(one.inputs[2].shape) * elements(one.inputs[1].shape[:-1])


def einsum(one: tf.Operation) -> int:
    """Multiplications of an einsum: one for each combination of all indices."""
    equation = one.get_attr("equation").decode()
    if "." in equation:
        raise Unknown(equation)
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.partition("->")[0].split(","), one.inputs, strict=True):
        sizes |= dict(zip(labels, [elements([size]) for size in tensor.shape], strict=True))
    return math.prod(sizes.values())


def elements(shape: Sequence[int | None]) -> int:
    """Number of elements of a shape. Raises Unknown if a size is unknown."""
    sizes = [size for size in shape if size is not None]
    if len(sizes) < len(shape):
        raise Unknown("shape")
    return math.prod(sizes)


COUNTS: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), matrices),
    **dict.fromkeys(("Conv2D", "Conv3D"), convolution),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), transposed),
    "DepthwiseConv2dNative": partial(convolution, axes=2),
    "Einsum": einsum,
}
"""Function that counts multiplications, by type of operation."""


def device_peak(dtype: tf.DType) -> float:
    """Peak rate in operations/s: the fastest of several matrix products. Draws no random numbers."""
    size = GPU_SIZE if tf.config.list_logical_devices("GPU") else CPU_SIZE
    left = tf.fill((size, size), tf.cast(0.5, dtype))

    def multiply() -> None:
        tf.matmul(left, left)[0, 0].numpy()  # waits for the device

    return peak_per_s(multiply, size)


class KerasProfiler:
    """See train.watchers.Profiler. Writes ``<target>/plugins/profile/<time>/<host>.xplane.pb``.

    The exchange begins and ends within the step's graph, on any of TensorFlow's threads.
    """

    def __init__(self) -> None:
        self.range = ExitStack()

    def start(self, target: Path) -> None:
        try:
            tf.profiler.experimental.start(str(target))
        except tf.errors.OpError as error:  # the process is profiled already
            raise OSError(error.message) from error

    def show(self, name: str) -> None:
        self.range.close()
        if name:
            self.range.enter_context(tf.profiler.experimental.Trace(name))

    def stop(self) -> None:
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            raise OSError(error.message) from error

    def abandon(self) -> None:
        with suppress(tf.errors.OpError):
            tf.profiler.experimental.stop(save=False)
