"""Sums of TensorFlow gradients over ranks, a few tensors that travel together: by MPI through host memory, or by
Horovod's operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import Feature, refuse
from hpctrain.config.sections import ReduceConfig
from hpctrain.reduce import horovod_setup
from hpctrain.reduce.candidates import Candidate, candidates, look_around
from hpctrain.reduce.compression import CODECS
from hpctrain.reduce.host_allreduce import PieceAllreduce, open_piece_allreduce
from hpctrain.reduce.int8_sum import Residue, residue_of
from hpctrain.reduce.layout import LOSS, SLOTS, SQUARE, plan
from hpctrain.reduce.reducer_choice import Choice, ReducerChoice

JOINED_BYTES = 65536
"""Of gradients that travel as one piece: each more costs some 10 us on its way to Python and back."""
Told = Callable[[], None] | None
"""What is called on the host."""


class Reducer(Protocol):
    """Sums pieces over the ranks. Every rank makes the same calls in the same order."""

    name: str
    """Of the candidate, such as mpi-node."""
    lends: bool
    """Whether ``borrow`` lends."""
    meets: bool
    """Whether there are other ranks to wait for."""

    def sum(self, pieces: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        """The sums of the pieces over the ranks; in a TensorFlow function or outside.

        Args:
            pieces: as ``KerasGradients.pack`` makes them, of the same shapes on every rank. The last one travels in
                full precision.
            before: called when they are complete.
            after: called when the sums are there.

        Returns:
            Sums of the same shapes and dtypes. The last one holds the square of the norm of the others, too.
        """

    def borrow(self, pieces: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        """The same without a copy, if the reducer lends: from memory that other ranks read and the next call
        overwrites.

        For functions that keep all sums alive to their end, since TensorFlow may compute in the memory of a tensor that
        nothing else holds, and assign none to a variable, since that would share the memory.
        """

    def close(self) -> None:
        """Releases memory and communicators, ends threads."""


class NoReducer:
    """One rank: its gradients are the sum."""

    name = "none"
    lends = meets = False

    def sum(self, pieces: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        return with_square(telling(after, telling(before, pieces)))

    borrow = sum

    def close(self) -> None:
        """See Reducer."""


class HostReducer:
    """MPI sums over the pieces in host memory, where TensorFlow on CPUs leaves them and reads the sums."""

    meets = True

    def __init__(self, name: str, host: PieceAllreduce, joined: bool, residue: Residue | None = None) -> None:
        """``joined``: all gradients are one piece for ``host``, as is best if they are few or on a GPU."""
        self.name = name
        self.residue = residue
        self.host = host
        self.lends = not joined
        self.close = host.close

    def sum(self, pieces: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        return [tf.raw_ops.DeepCopy(x=total) for total in self.borrow(pieces, before, after)]

    def borrow(self, pieces: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        if self.lends:
            return self._call(pieces, before, after)
        *gradients, slots = pieces
        together, total = self._call([join(gradients), slots], before, after)
        return [*split(together, gradients), total]

    def _call(self, pieces: Sequence[tf.Tensor], before: Told, after: Told) -> list[tf.Tensor]:
        def exchanged(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
            tell(before)
            sums = self.host.sum(*arrays)
            tell(after)
            return sums

        sums = tf.numpy_function(exchanged, pieces, [self.host.dtype] * len(pieces))
        for total, piece in zip(sums, pieces, strict=True):
            total.set_shape(piece.shape)
        return [tf.cast(total, piece.dtype) for total, piece in zip(sums, pieces, strict=True)]


class HorovodReducer:
    """One Horovod allreduce of all pieces: nothing is left for its dynamic fusion to reorder."""

    lends, meets = False, True

    def __init__(self, name: str, lease: horovod_setup.Lease, compress: bool) -> None:
        self.name = name
        self.lease = lease
        self.horovod = lease.module
        self.compress = compress

    def sum(self, pieces: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        return telling(after, with_square(self._sum(telling(before, pieces))))

    borrow = sum

    def _sum(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if not self.compress:
            return split(self._allreduce(join(pieces), "gradients"), pieces)
        *gradients, slots = pieces
        half = self._allreduce(tf.cast(join(gradients), tf.float16), "gradients_fp16")
        return [*split(tf.cast(half, slots.dtype), gradients), self._allreduce(slots, "totals")]

    def _allreduce(self, values: tf.Tensor, name: str) -> tf.Tensor:
        return self.horovod.allreduce(values, op=self.horovod.Sum, name=f"hpctrain_{name}_{self.lease.number}")

    def close(self) -> None:
        """Gives up its use of Horovod."""
        self.lease.end()


def tell(told: Told) -> None:
    """Calls it, if there is one."""
    if told is not None:
        told()


def python_called(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """A scalar that Python gives, in a TensorFlow function."""
    given = tf.numpy_function(function, inputs, dtype)
    given.set_shape(())
    return given


def telling(told: Told, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The pieces; the host is notified when they are complete."""
    if told is None:
        return list(pieces)

    def hear(_: NDArray[Any]) -> np.bool_:
        told()
        return np.True_

    with tf.control_dependencies(pieces):
        heard = python_called(hear, [pieces[-1]], tf.bool)  # it gets a value, so that a device has come so far
    with tf.control_dependencies([heard]):
        return [tf.identity(piece) for piece in pieces]


def with_square(pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The same, if the last one holds the square of the norm of the others."""
    *gradients, slots = pieces
    square = 2.0 * tf.add_n([tf.nn.l2_loss(gradient) for gradient in gradients] or [tf.zeros((), slots.dtype)])
    return [*gradients, slots + square * tf.one_hot(SQUARE, SLOTS, dtype=slots.dtype)]


class FastFloat16:
    """compression.Float16 by TensorFlow's vectorised casts: the same bits, many times faster than NumPy's."""

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        np.copyto(out.view(np.float16), np.asarray(tf.cast(tf.convert_to_tensor(values), tf.float16)))

    def decode(self, packed: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        np.copyto(out, np.asarray(tf.cast(tf.convert_to_tensor(packed.view(np.float16)), tf.float32)))


def open_reducer(candidate: Candidate, group: Group, pieces: Pieces, exact_updates: int = 0) -> Reducer:
    """The reducer of a candidate. Collective over the group. ``exact_updates`` is reduce.compress_after_steps.

    Raises:
        UserError: Horovod is missing or does not fit; see horovod_setup.
    """
    if candidate.kind == "none" or group.size == 1:
        return NoReducer()
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    if candidate.kind == "horovod":
        horovod = horovod_setup.load("tensorflow")
        lease = horovod_setup.start(horovod, group, on_gpu)
        return HorovodReducer(candidate.name, lease, candidate.compression == "fp16")
    layout, shapes = pieces.layout, pieces.shapes
    length = sum(layout.sizes)
    joined = on_gpu or length * pieces.dtype.size <= JOINED_BYTES
    if joined:
        layout, shapes = plan([length], None, SLOTS), [(length,)]
    codecs = {**CODECS, "fp16": FastFloat16()}
    residue = residue_of(candidate, layout, exact_updates)
    candidate, host = open_piece_allreduce(
        candidate, group, layout, shapes, pieces.dtype.as_numpy_dtype, codecs, residue
    )
    return HostReducer(candidate.name, host, joined, residue)


@dataclass(frozen=True)
class KerasReducers:
    """Reducers of one model's gradients; see reducer_choice.Reducers.

    Gradients are sent after backward, never during it: the monitor needs to know when a rank has finished its own work.
    """

    pieces: Pieces
    exact_updates: int = 0
    """See reduce.compress_after_steps."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        refuse({Feature.KERAS: True, **config.features()})
        gpu = bool(tf.config.list_logical_devices("GPU"))
        around = look_around(config, world, gpu, lambda: horovod_setup.available("tensorflow"))
        return candidates(replace(config, overlap="off"), around)

    def open(self, candidate: Candidate, group: Group) -> Reducer:
        return open_reducer(candidate, group, self.pieces, self.exact_updates)


def measured_reducer(
    config: ReduceConfig,
    world: World,
    pieces: Pieces,
    rehearse: Callable[[Reducer], object],
    chosen: str | None = None,
    announce: Callable[[Choice], object] | None = None,
) -> Reducer:
    """The reducer that the configuration names or, for ``auto``, the one that is fastest here. Collective.

    Args:
        config: the run file's section.
        world: the ranks.
        pieces: of the gradients.
        rehearse: runs forward, backward and ``sum`` once with the reducer it gets, and leaves the model as it was.
        chosen: the name of an earlier choice, which is kept without measuring.
        announce: called with what was measured, if there was a choice.

    Raises:
        UserError: the configured kind cannot be used here, for example Horovod that is not installed.
    """
    return ReducerChoice(config, world, chosen, announce).reducer(
        KerasReducers(pieces, config.compress_after_steps), rehearse
    )


def broadcast(group: Group, variables: Iterable[tf.Variable], what: str) -> None:
    """Overwrites variables with those of the group's rank 0. Collective.

    Args:
        group: the ranks, such as ``world.data``.
        variables: of the same shapes and types on every rank.
        what: completes "waited for the other ranks to ..." in an error.
    """
    if group.comm is None:
        return
    for variable in variables:
        host = np.array(variable.read_value())
        group.broadcast_array(host, what)
        variable.assign(host)


STACKED = 16384
"""Elements: smaller gradients of one shape travel as one tensor. A tensor more costs as much as copying these."""


class Pieces:
    """Which gradients make which tensor: large ones are taken as they are, small ones of one shape are stacked.

    The last piece holds numbers that travel along, such as the loss. TensorFlow makes and takes apart all of them in a
    few operations.

    Args:
        variables: those to train, in the order in which gradients are given and returned.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        shapes = [tuple(variable.shape) for variable in variables]
        self.dtype = exchanged_dtype(variables)
        """In which gradients are exchanged."""
        self.groups = grouped(shapes)
        """Indices of the variables of each piece."""
        self.variable_shapes = shapes
        self.shapes = [
            shapes[group[0]] if len(group) == 1 else (len(group), *shapes[group[0]]) for group in self.groups
        ]
        """Of all pieces but the last."""
        self.layout = plan([math.prod(shape) for shape in self.shapes], None, SLOTS)
        """Of the pieces in one flat buffer, for sums that need one."""

    def pack(self, gradients: Sequence[Any], loss: Any) -> list[tf.Tensor]:
        """The pieces, to be summed over the ranks.

        Args:
            gradients: in the order of the variables, each of its variable's shape; dense.
            loss: scalar, this rank's part of the mean loss over all ranks' samples.
        """
        return self.pack_with(gradients, {LOSS: loss})

    def mean_loss(self, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        """The loss in summed pieces: a scalar."""
        return pieces[-1][LOSS]

    def pack_with(self, gradients: Sequence[Any], slots: Mapping[int, Any]) -> list[tf.Tensor]:
        """The pieces, with scalars by their place among the slots; zeros elsewhere."""
        known = [tf.cast(gradient, self.dtype) for gradient in gradients]
        for gradient, shape in zip(known, self.variable_shapes, strict=True):
            gradient.set_shape(shape)  # TensorFlow itself does not know that of Dense over three axes, for one
        packed = [
            known[group[0]] if len(group) == 1 else tf.stack([known[index] for index in group]) for group in self.groups
        ]
        return [*packed, tf.stack([tf.cast(slots.get(slot, 0.0), self.dtype) for slot in range(SLOTS)])]

    def unpack(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients in such pieces, in the order of the variables.

        Args:
            pieces: of ``pack``, summed over the ranks; the last one may be left out.
        """
        found: dict[int, tf.Tensor] = {}
        for group, piece in zip(self.groups, pieces, strict=False):
            found.update(zip(group, [piece] if len(group) == 1 else tf.unstack(piece), strict=True))
        return [found[index] for index in range(len(self.variable_shapes))]

    def zeros(self) -> list[tf.Tensor]:
        """What a rank contributes whose part of the batch is empty."""
        return [tf.zeros(shape, self.dtype) for shape in [*self.shapes, (SLOTS,)]]


def exchanged_dtype(variables: Sequence[keras.Variable]) -> tf.DType:
    """In which gradients of these are summed."""
    return tf.float64 if any(variable.dtype == "float64" for variable in variables) else tf.float32


def grouped(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Indices of small arrays of one shape together, all others alone; in the order of each group's first."""
    groups: dict[Any, list[int]] = {}
    for index, shape in enumerate(shapes):
        groups.setdefault(shape if math.prod(shape) < STACKED else index, []).append(index)
    return [tuple(group) for group in groups.values()]


def join(pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    """One flat tensor of all pieces, in their order."""
    return tf.concat([tf.reshape(piece, (-1,)) for piece in pieces] or [tf.zeros((0,))], 0)


def split(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Undoes ``join``."""
    parts = tf.split(flat, [math.prod(piece.shape) for piece in like]) if like else []
    return [tf.reshape(part, piece.shape) for part, piece in zip(parts, like, strict=True)]
