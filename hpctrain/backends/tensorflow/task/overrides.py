"""What a Keras model's class overrides of training and evaluation, and what its own steps return."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.errors import UserError, kind_of
from hpctrain.tasks.definition import KerasTask


def trains_itself(model: Any) -> bool:
    """Whether a model's class overrides a step of Keras, or what it consists of: then it is trained by its steps."""
    kind = type(model)
    return isinstance(model, keras.Model) and (
        kind.train_step is not keras.Model.train_step
        or kind.test_step is not keras.Model.test_step
        or kind.compute_loss is not keras.Model.compute_loss
        or kind.compute_metrics is not keras.Model.compute_metrics
    )


def evaluates_itself(model: keras.Model) -> bool:
    """Whether an evaluation is the model's ``test_step``: its own one, or Keras' if it has a loss for that."""
    kind = type(model)
    if kind.test_step is not keras.Model.test_step:
        return True
    return trains_itself(model) and (
        model._compile_loss is not None or kind.compute_loss is not keras.Model.compute_loss
    )


def scalars(logs: Any, name: str) -> dict[str, tf.Tensor]:
    """What a step returned, by name.

    Raises:
        UserError: it is not a dict of scalars.
    """
    if not isinstance(logs, Mapping):
        raise UserError(
            f"{name} of the model returned {'None' if logs is None else kind_of(logs)}",
            "return a dict of scalars: {'loss': loss}, or {m.name: m.result() for m in self.metrics}",
        )
    found: dict[str, tf.Tensor] = {}
    for key, value in logs.items():
        if isinstance(value, Mapping):  # of compiled metrics
            found |= scalars(value, name)
            continue
        scalar = tf.cast(tf.convert_to_tensor(value), tf.float32)
        if scalar.shape.rank != 0:
            raise UserError(
                f"{name} of the model returned {key!r} of shape {list(scalar.shape)}", "return scalars: take the mean"
            )
        found[str(key)] = scalar
    if not found:
        raise UserError(f"{name} of the model returned an empty dict", "return a dict of scalars: {'loss': loss}")
    return found


def tested(task: KerasTask, batch: Mapping[str, tf.Tensor]) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """(sum, weight) of what the model's ``test_step`` says of a batch; in a TensorFlow function."""
    task.model.reset_metrics()
    samples = tf.cast(tf.shape(next(iter(batch.values())))[0], tf.float32)
    logs = scalars(task.model.test_step(task.fit_data(dict(batch))), "test_step")
    return {name: (value * samples, samples) for name, value in logs.items()}


Apply = Callable[[Any, Any], None]
"""apply(gradients, variables) of one optimizer."""


@contextlib.contextmanager
def intercepted(handle: Callable[[keras.optimizers.Optimizer, Apply, Any, Any], None]) -> Iterator[None]:
    """In the body, ``optimizer.apply(gradients, variables)`` is ``handle(optimizer, apply, gradients, variables)``.

    It is the classes that are changed, and changed back at the end: so no optimizer escapes, wherever it is kept. What
    an optimizer applies inside its own ``apply``, by other optimizers or by its base class, is left alone.
    """
    inside = False

    def replacement(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def apply(self: keras.optimizers.Optimizer, grads: Any, trainable_variables: Any = None) -> None:
            nonlocal inside
            if inside:
                original(self, grads, trainable_variables)
                return
            inside = True
            try:
                handle(self, functools.partial(original, self), grads, trainable_variables)
            finally:
                inside = False

        return apply

    originals = {cls: vars(cls)["apply"] for cls in family(keras.optimizers.Optimizer) if "apply" in vars(cls)}
    for cls, original in originals.items():
        cls.apply = replacement(original)
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.apply = original


def family(cls: type) -> set[Any]:
    """A class, those that it is derived from, and all that are derived from it."""
    found: set[Any] = set(cls.__mro__)
    waiting: list[Any] = [cls]
    while waiting:
        more = waiting.pop().__subclasses__()
        waiting += more
        found.update(more)
    return found


WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceStridedSliceAssign")
"""What the names of operations begin with that change a variable, their first input."""


def written_by_own_values(
    graph: tf.Graph, inputs: Sequence[tf.Tensor], equal: Iterable[tf.Variable], summed: Sequence[tf.Tensor]
) -> tf.Variable | None:
    """A variable that must be equal on all ranks, and gets a value that no exchange has made equal; None if none does.

    Writes inside nested functions (``tf.cond``) are not seen.

    Args:
        graph: of a traced function.
        inputs: of it that differ between ranks.
        equal: variables that are equal on all ranks.
        summed: what came out of exchanges.
    """
    by_handle = {id(variable.handle): variable for variable in equal}
    shared = {inside.name: by_handle[id(outside)] for outside, inside in graph.captures if id(outside) in by_handle}
    resources = [inside.name for _, inside in graph.captures if inside.dtype == tf.resource]
    own = {each.name for each in inputs} | {name for name in resources if name not in shared}
    clean = {each.name for each in summed}
    for operation in graph.get_operations():  # in the order in which they were made, so that inputs come first
        names = [each.name for each in operation.inputs]
        if own.isdisjoint(names):
            continue
        if operation.type.startswith(WRITES) and names[0] in shared:
            return shared[names[0]]
        own.update(each.name for each in operation.outputs if each.name not in clean)
    return None
