"""A finite tf.data pipeline as a Dataset: it is run once and its samples are kept in memory.

A pipeline can only be read from its start, so it could neither be partitioned identically for any number of ranks nor
resumed in the middle. Data that does not fit in memory belongs in an HDF5 file.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hpctrain.data.dataset import ArrayDataset, Field, from_arrays, with_place
from hpctrain.data.samples import named, stack
from hpctrain.errors import UserError

MEMORY_BYTES = 4 * 2**30
"""Largest size of a pipeline's samples: every rank holds all of them."""


def adapted(source: Any, names: tuple[str, ...] | None, ragged: bool = False) -> ArrayDataset:
    """Reads a tf.data.Dataset with one sample per element: dicts, tuples or single tensors.

    With ``ragged``, arrays may differ in shape, but not in the number of axes.

    Raises:
        UserError: the pipeline is endless, empty, too large or failing, or its samples differ in shape.
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
            samples.append(named(element, names or names_of(element)))
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


def names_of(element: Any) -> tuple[str, ...] | None:
    """The names of a triple's parts, which ``fit`` takes as weighted samples; None for other elements."""
    return ("x", "y", "sample_weight") if isinstance(element, tuple) and len(element) == 3 else None


def in_order(source: Any) -> Any:
    """Makes the order of the pipeline's elements deterministic."""
    options = tf.data.Options()
    options.deterministic = True
    return source.with_options(options)
