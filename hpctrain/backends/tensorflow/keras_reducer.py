"""Sums TensorFlow gradients over ranks as a few packed tensors: by MPI through host memory, or by Horovod."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import HpctrainError
from hpctrain.reduce import horovod_setup
from hpctrain.reduce.candidates import Candidate, candidates, look_around
from hpctrain.reduce.flat_layout import ALIGNMENT, LOSS, SLOTS, SQUARE, plan
from hpctrain.reduce.host_allreduce import PieceAllreduce, open_piece_allreduce
from hpctrain.reduce.reducer_choice import Choice, ReducerChoice
from hpctrain.system.array_types import Array

JOINED_BYTES = 65536
"""Total gradient size up to which all gradients form one piece: each further piece costs about 10 us in Python."""
Callback = Callable[[], None] | None
"""A callback on the host, or None."""


class KerasReducer:
    """Sums pieces over the ranks, which all make the same calls in the same order. This one is for one rank alone."""

    name = "none"
    """The candidate's name, such as mpi-node."""
    lends = False
    """Whether ``borrow`` avoids the copy."""
    has_peers = False
    """Whether there are other ranks."""

    def sum(self, pieces: Sequence[tf.Tensor], before: Callback = None, after: Callback = None) -> list[tf.Tensor]:
        """Sums the pieces over the ranks; works inside and outside of TensorFlow functions.

        Args:
            pieces: from ``Pieces.pack``, with the same shapes on every rank. The last one is never compressed.
            before: called when the pieces are complete.
            after: called when the sums are complete.

        Returns:
            Sums with the same shapes and dtypes. The last one also holds the squared norm of the others.
        """
        return with_square(notifying(after, notifying(before, pieces)))

    def borrow(self, pieces: Sequence[tf.Tensor], before: Callback = None, after: Callback = None) -> list[tf.Tensor]:
        """``sum`` without a copy, if the reducer lends: the results are in memory that the next call overwrites.

        The caller must keep all sums alive to its end, since TensorFlow may reuse the memory of a tensor with no other
        references, and assign none to a variable, which would share the memory.
        """
        return self.sum(pieces, before, after)

    def close(self) -> None:
        """Releases memory and communicators and ends threads."""


class HostReducer(KerasReducer):
    """Sums pieces by MPI in host memory, which TensorFlow on CPUs uses without copies."""

    has_peers = True

    def __init__(self, name: str, host: PieceAllreduce, joined: bool) -> None:
        """``joined``: pass all gradients to ``host`` as one piece, which is best if they are small or on a GPU."""
        self.name = name
        self.host = host
        self.lends = not joined

    def sum(self, pieces: Sequence[tf.Tensor], before: Callback = None, after: Callback = None) -> list[tf.Tensor]:
        return [tf.raw_ops.DeepCopy(x=total) for total in self.borrow(pieces, before, after)]

    def borrow(self, pieces: Sequence[tf.Tensor], before: Callback = None, after: Callback = None) -> list[tf.Tensor]:
        if self.lends:
            return self._call(pieces, before, after)
        *gradients, slots = pieces
        together, total = self._call([join(gradients), slots], before, after)
        return [*split(together, gradients), total]

    def close(self) -> None:
        self.host.close()

    def _call(self, pieces: Sequence[tf.Tensor], before: Callback, after: Callback) -> list[tf.Tensor]:
        def exchanged(*arrays: Array) -> list[Array]:
            notify(before)
            sums = self.host.sum(*arrays)
            notify(after)
            return sums

        sums = on_host(exchanged, pieces, [self.host.dtype] * len(pieces))
        for total, piece in zip(sums, pieces, strict=True):
            total.set_shape(piece.shape)
        return [tf.cast(total, piece.dtype) for total, piece in zip(sums, pieces, strict=True)]


class HorovodReducer(KerasReducer):
    """Horovod's sums of messages with fixed bounds, so that its dynamic fusion cannot change the order of summation.

    Small pieces are joined, and very large ones are cut if the lease says so.
    """

    has_peers = True

    def __init__(self, name: str, lease: horovod_setup.Lease, compress: bool) -> None:
        self.name = name
        self.lease = lease
        self.horovod = lease.module
        self.compress = compress

    def sum(self, pieces: Sequence[tf.Tensor], before: Callback = None, after: Callback = None) -> list[tf.Tensor]:
        called = calling(before, pieces)  # messages do not wait for it, nor for each other's gradients
        sums = with_square(self._sum(pieces))
        with tf.control_dependencies(called):
            sums[-1] = tf.identity(sums[-1])
        return notifying(after, sums)

    def _sum(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if not self.compress:
            return self._summed(pieces, "gradients")
        *gradients, slots = pieces
        halves = self._summed([tf.cast(gradient, tf.float16) for gradient in gradients], "gradients_fp16")
        return [*(tf.cast(half, slots.dtype) for half in halves), *self._summed([slots], "totals")]

    def _summed(self, pieces: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        sizes = [math.prod(piece.shape) for piece in pieces]
        kind = sum(sizes), pieces[0].dtype.size if pieces else 1
        most, least = self.lease.most(*kind), self.lease.least(*kind)
        small = [index for index, size in enumerate(sizes) if size < least]
        groups = [[index] for index, size in enumerate(sizes) if size >= least]
        if small:
            groups.append(small)
        found: dict[int, tf.Tensor] = {}
        for members in groups:
            some = [pieces[index] for index in members]
            parts = cut(join(some) if len(some) > 1 else some[0], most)
            sums = [self._allreduce(part, f"{name}_{members[0]}_{number}") for number, part in enumerate(parts)]
            found.update(zip(members, split(join(sums), some), strict=True))
        return [found[index] for index in range(len(pieces))]

    def _allreduce(self, values: tf.Tensor, name: str) -> tf.Tensor:
        # A group of one: groups are not fused with each other (horovod_setup.SETTINGS).
        name = f"hpctrain_{name}_{self.lease.number}"
        return self.horovod.grouped_allreduce([values], op=self.horovod.Sum, name=name)[0]

    def close(self) -> None:
        """Ends its use of Horovod."""
        self.lease.end()


def notify(callback: Callback) -> None:
    """Calls the callback, if there is one."""
    if callback is not None:
        callback()


RAISED: list[HpctrainError] = []
"""Errors of functions that TensorFlow called, in place of which it raises its own."""


def on_host(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Any) -> Any:
    """``tf.numpy_function``, of which ``own_errors`` raises the errors."""

    def called(*arrays: Array) -> Any:
        try:
            return function(*arrays)
        except HpctrainError as error:
            RAISED.append(error)
            raise

    return tf.numpy_function(called, inputs, dtypes)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """In the body, an error of a function that TensorFlow called is raised as it was."""
    RAISED.clear()
    try:
        yield
    except tf.errors.OpError as error:
        if RAISED:
            raise RAISED[0] from error
        raise


def python_called(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Calls a Python function that returns a scalar from within a TensorFlow function."""
    given = on_host(function, inputs, dtype)
    given.set_shape(())
    return given


def calling(callback: Callback, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls the callback on the host when the pieces are complete. Returns what to depend on; empty for no callback."""
    if callback is None:
        return []

    def call(_: Array) -> np.bool_:
        callback()
        return np.True_

    with tf.control_dependencies(pieces):
        return [python_called(call, [pieces[-1]], tf.bool)]  # passing a value waits for the device


def notifying(callback: Callback, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the pieces; a callback on the host runs when they are complete."""
    with tf.control_dependencies(calling(callback, pieces)):
        return [tf.identity(piece) for piece in pieces]


def with_square(pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds the squared norm of the other pieces to the last one."""
    *gradients, slots = pieces
    square = 2.0 * tf.add_n([tf.nn.l2_loss(gradient) for gradient in gradients] or [tf.zeros((), slots.dtype)])
    return [*gradients, slots + square * tf.one_hot(SQUARE, SLOTS, dtype=slots.dtype)]


@dataclass(frozen=True)
class CastCodec:
    """Converts to 16 bits and back with TensorFlow's vectorised casts."""

    dtype: tf.DType

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        np.copyto(out.view(self.dtype.as_numpy_dtype), np.asarray(tf.cast(tf.convert_to_tensor(values), self.dtype)))

    def decode(self, packed: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        given = tf.convert_to_tensor(packed.view(self.dtype.as_numpy_dtype))
        np.copyto(out, np.asarray(tf.cast(given, tf.float32)))


CODECS = {"fp16": CastCodec(tf.float16), "bf16": CastCodec(tf.bfloat16)}


@dataclass(frozen=True)
class KerasReducerFactory:
    """Reducers of one model's gradients; see reducer_choice.ReducerFactory.

    Gradients are exchanged after the backward pass, never during it, so that the monitor sees when a rank has finished
    its own work.
    """

    pieces: Pieces

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        refuse({Feature.KERAS: True, **config.features()})
        gpu = bool(tf.config.list_logical_devices("GPU"))
        around = look_around(config, world, gpu, lambda: horovod_setup.available("tensorflow"))
        return candidates(replace(config, overlap="off"), around)

    def open(self, candidate: Candidate, group: Group) -> KerasReducer:
        """Opens the reducer of a candidate. Collective over the group.

        Raises:
            UserError: Horovod is missing or incompatible; see horovod_setup.
        """
        if candidate.kind == "none" or group.size == 1:
            return KerasReducer()
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        if candidate.kind == "horovod":
            horovod = horovod_setup.load("tensorflow")
            lease = horovod_setup.start(horovod, group, on_gpu)
            return HorovodReducer(candidate.name, lease, candidate.compression == "fp16")
        pieces = self.pieces
        layout, shapes = pieces.layout, pieces.shapes
        length = sum(layout.sizes)
        joined = on_gpu or length * pieces.dtype.size <= JOINED_BYTES
        if joined:
            layout, shapes = plan([length], None, SLOTS), [(length,)]
        dtype = pieces.dtype.as_numpy_dtype
        candidate, host = open_piece_allreduce(candidate, group, layout, shapes, dtype, CODECS)
        return HostReducer(candidate.name, host, joined)


def measured_reducer(
    config: ReduceConfig,
    world: World,
    pieces: Pieces,
    rehearse: Callable[[KerasReducer], object],
    chosen: str | None = None,
    announce: Callable[[Choice], object] | None = None,
) -> KerasReducer:
    """Opens the configured reducer or, for ``auto``, the fastest one here. Collective.

    Args:
        config: the run file's section.
        world: the ranks.
        pieces: pieces of the gradients.
        rehearse: runs forward, backward and ``sum`` once with a given reducer, leaving the model unchanged.
        chosen: name of an earlier choice, which is kept without measuring.
        announce: called with the measurements, if there was a choice.

    Raises:
        UserError: the configured kind cannot be used here, for example because Horovod is not installed.
    """
    return ReducerChoice(config, world, chosen, announce).reducer(KerasReducerFactory(pieces), rehearse)


def broadcast(group: Group, variables: Iterable[tf.Variable], what: str) -> None:
    """Overwrites variables with those of the group's rank 0. Collective.

    Args:
        group: the ranks, such as ``world.data``.
        variables: the variables, with the same shapes and dtypes on every rank.
        what: completes "waited for the other ranks to ..." in an error.
    """
    if group.comm is None:
        return
    for variable in variables:
        host = np.array(variable.read_value())
        group.broadcast_array(host, what)
        variable.assign(host)


STACKED = 16384
"""Elements below which gradients of one shape are stacked: copying these costs as much as one more tensor."""


class Pieces:
    """Packs gradients into pieces: large ones stay single tensors, small ones of the same shape are stacked.

    The last piece holds extra scalars (slots), such as the loss. Packing and unpacking take few TensorFlow operations.

    Args:
        variables: the trained variables, in the order in which gradients are given and returned.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        shapes = [tuple(variable.shape) for variable in variables]
        self.dtype = exchanged_dtype(variables)
        """Dtype in which gradients are exchanged."""
        self.groups = grouped(shapes)
        """Indices of the variables of each piece."""
        self.variable_shapes = shapes
        self.shapes = [
            shapes[group[0]] if len(group) == 1 else (len(group), *shapes[group[0]]) for group in self.groups
        ]
        """Shapes of all pieces but the last."""
        self.layout = plan([math.prod(shape) for shape in self.shapes], None, SLOTS)
        """Layout of the pieces in one flat buffer, for sums that need one."""

    def pack(self, gradients: Sequence[Any], loss: Any) -> list[tf.Tensor]:
        """Packs gradients and the loss into pieces to be summed over the ranks.

        Args:
            gradients: dense gradients in the order of the variables, each with its variable's shape.
            loss: scalar; this rank's part of the mean loss over all ranks' samples.
        """
        return self.pack_with(gradients, {LOSS: loss})

    def mean_loss(self, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the loss in summed pieces, a scalar."""
        return pieces[-1][LOSS]

    def pack_with(self, gradients: Sequence[Any], slots: Mapping[int, Any]) -> list[tf.Tensor]:
        """Packs gradients, with scalars by slot number; other slots are zero."""
        known = [tf.cast(gradient, self.dtype) for gradient in gradients]
        for gradient, shape in zip(known, self.variable_shapes, strict=True):
            gradient.set_shape(shape)  # unknown to TensorFlow for Dense over three axes, for example
        packed = []
        for group in self.groups:
            members = [known[index] for index in group]
            packed.append(members[0] if len(members) == 1 else tf.stack(members))
        return [*packed, tf.stack([tf.cast(slots.get(slot, 0.0), self.dtype) for slot in range(SLOTS)])]

    def unpack(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Unpacks the gradients, in the order of the variables.

        Args:
            pieces: pieces from ``pack``, summed over the ranks; the last one may be left out.
        """
        found: dict[int, tf.Tensor] = {}
        for group, piece in zip(self.groups, pieces, strict=False):
            found.update(zip(group, [piece] if len(group) == 1 else tf.unstack(piece), strict=True))
        return [found[index] for index in range(len(self.variable_shapes))]

    def zeros(self) -> list[tf.Tensor]:
        """Pieces of a rank whose part of the batch is empty."""
        return [tf.zeros(shape, self.dtype) for shape in [*self.shapes, (SLOTS,)]]


def exchanged_dtype(variables: Sequence[keras.Variable]) -> tf.DType:
    """Dtype in which the gradients of these variables are summed."""
    return tf.float64 if any(variable.dtype == "float64" for variable in variables) else tf.float32


def grouped(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Groups the indices of small arrays of the same shape; large arrays are alone. Ordered by each group's first."""
    groups: dict[Any, list[int]] = {}
    for index, shape in enumerate(shapes):
        groups.setdefault(shape if math.prod(shape) < STACKED else index, []).append(index)
    return [tuple(group) for group in groups.values()]


def join(pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates all pieces into one flat tensor."""
    return tf.concat([tf.reshape(piece, (-1,)) for piece in pieces] or [tf.zeros((0,))], 0)


def cut(values: tf.Tensor, most: int) -> list[tf.Tensor]:
    """Cuts a tensor into parts of at most ``most`` elements; without a copy if its size is a multiple of ALIGNMENT."""
    size = math.prod(values.shape)
    if size <= most:
        return [values]
    width = ALIGNMENT if size % ALIGNMENT == 0 else 1
    rows = tf.reshape(values, (-1, width))
    step = max(1, most // width)
    parts: list[tf.Tensor] = tf.split(
        rows, [min(step, size // width - begin) for begin in range(0, size // width, step)]
    )
    return parts


def split(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The inverse of ``join``."""
    parts = tf.split(flat, [math.prod(piece.shape) for piece in like]) if like else []
    return [tf.reshape(part, piece.shape) for part, piece in zip(parts, like, strict=True)]
