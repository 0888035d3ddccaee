"""Which values in a traced step differ between ranks, because they are made of a rank's own samples or state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

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
