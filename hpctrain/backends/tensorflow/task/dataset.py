"""A finite tf.data pipeline as a Dataset: it is run once, and its samples are kept in memory.

A pipeline can only be read from its beginning, so it could neither be cut into the same samples for any number of ranks
nor be resumed in its middle. Data that does not fit into memory belongs into an HDF5 file.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hpctrain.data.dataset import ArrayDataset, Field, from_arrays, with_place
from hpctrain.data.samples import named, stack
from hpctrain.errors import UserError

MEMORY_BYTES = 4 * 2**30
"""Most that a pipeline may give: every rank holds all of it."""


def adapted(source: Any, names: tuple[str, ...] | None, ragged: bool = False) -> ArrayDataset:
    """The samples of a tf.data.Dataset that gives one sample an element: dicts, tuples or single tensors.

    With ``ragged`` their arrays may differ in shape, but not in the number of axes.

    Raises:
        UserError: endless, empty, too large for memory, failing, or with samples of different shapes.
    """
    if not isinstance(source, tf.data.Dataset):
        raise UserError(f"{type(source).__name__} cannot be opened as data", "give a tf.data.Dataset")
    if source.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UserError(
            "the tf.data pipeline is endless",
            "leave out its repeat(): hpctrain begins the next epoch itself; or train on it as a stream",
        )
    samples = []
    num_bytes = 0
    try:
        for element in in_order(source).as_numpy_iterator():
            samples.append(named(element, names))
            num_bytes += sum(value.nbytes for value in samples[-1].values())
            if num_bytes > MEMORY_BYTES:
                raise UserError(
                    f"the tf.data pipeline gives more than {MEMORY_BYTES / 2**30:.0f} GiB, which every rank would hold",
                    "write its samples to HDF5 once (hpctrain.write_hdf5), or train on it as a stream: open_stream",
                )
    except tf.errors.OpError as error:
        raise UserError(
            f"the tf.data pipeline failed on sample {len(samples)}: {with_place(error)}", "correct it"
        ) from error
    if not samples:
        raise UserError("the tf.data pipeline gives no samples", "give data with at least one sample")
    fields = {name: Field((-1,) * value.ndim, value.dtype) for name, value in samples[0].items()} if ragged else None
    return from_arrays(stack(samples, range(len(samples)), "the tf.data pipeline", fields), "the tf.data pipeline")


def in_order(source: Any) -> Any:
    """The pipeline, with its elements in the same order each time that it is read."""
    options = tf.data.Options()
    options.deterministic = True
    return source.with_options(options)
