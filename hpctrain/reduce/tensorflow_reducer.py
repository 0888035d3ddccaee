"""Sums of TensorFlow gradients over ranks: by MPI through host memory, or by Horovod's operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import UserError
from hpctrain.reduce import horovod_setup
from hpctrain.reduce.choice import Candidate, Choice, candidates, choose, look_around
from hpctrain.reduce.compression import CODECS
from hpctrain.reduce.mpi_allreduce import HostSum
from hpctrain.reduce.open_mpi_sum import open_mpi_sum
from hpctrain.reduce.tensorflow_flat import ROW, FlatGradients


class Reducer(Protocol):
    """Sums flat gradients over the ranks. Every rank makes the same calls in the same order."""

    name: str
    """Of the candidate, such as mpi-node."""

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        """The sum over the ranks of float32[rows, 16], valid until the next call. The last row travels as fp32."""

    def close(self) -> None:
        """Releases memory and communicators, ends threads."""


class NoReducer:
    """One rank: its gradients are the sum."""

    name = "none"

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        """See Reducer."""
        return flat

    def close(self) -> None:
        """See Reducer."""


class HostReducer:
    """MPI sums a copy of the gradients in host memory, where TensorFlow on CPUs reads the sums without copying."""

    def __init__(self, name: str, host: HostSum) -> None:
        self.name = name
        self.host = host
        self.rows = host.buffer.reshape(-1, ROW)

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        """See Reducer."""
        np.copyto(self.rows, np.asarray(flat))
        self.host.finish()
        return tf.convert_to_tensor(self.rows)

    def close(self) -> None:
        """See Reducer."""
        self.host.close()


class HorovodReducer:
    """One Horovod allreduce of all gradients: nothing is left for its dynamic fusion to reorder."""

    def __init__(self, name: str, horovod: ModuleType, compress: bool) -> None:
        self.name = name
        self.horovod = horovod
        self.compress = compress
        self.sum = tf.function(self._sum)

    def _sum(self, flat: tf.Tensor) -> tf.Tensor:
        """See Reducer."""
        if not self.compress:
            return self._allreduce(flat, "gradients")
        half = self._allreduce(tf.cast(flat[:-1], tf.float16), "gradients_fp16")
        return tf.concat([tf.cast(half, tf.float32), self._allreduce(flat[-1:], "totals")], 0)

    def _allreduce(self, values: tf.Tensor, name: str) -> tf.Tensor:
        return self.horovod.allreduce(values, op=self.horovod.Sum, name=f"hpctrain_{name}")

    def close(self) -> None:
        """Ends Horovod's background thread, which would take time from the cores even when it has nothing to do."""
        self.horovod.shutdown()


class FastFloat16:
    """compression.Float16 by TensorFlow's vectorised casts: the same bits, many times faster than NumPy's."""

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        """See Codec."""
        np.copyto(out.view(np.float16), np.asarray(tf.cast(tf.convert_to_tensor(values), tf.float16)))

    def decode(self, packed: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        """See Codec."""
        np.copyto(out, np.asarray(tf.cast(tf.convert_to_tensor(packed.view(np.float16)), tf.float32)))


def open_reducer(candidate: Candidate, group: Group, length: int) -> Reducer:
    """The reducer of a candidate for ``length`` numbers, a multiple of 16. Collective over the group.

    Raises:
        UserError: Horovod is missing or does not fit; see horovod_setup.
    """
    if candidate.kind == "none" or group.size == 1:
        return NoReducer()
    if candidate.kind == "horovod":
        horovod = horovod_setup.load("tensorflow")
        horovod_setup.start(horovod, group, on_gpu=bool(tf.config.list_logical_devices("GPU")))
        return HorovodReducer(candidate.name, horovod, candidate.compression == "fp16")
    candidate, host = open_mpi_sum(candidate, group, length, np.float32, {**CODECS, "fp16": FastFloat16()})
    return HostReducer(candidate.name, host)


def measured_reducer(
    config: ReduceConfig,
    world: World,
    flat: FlatGradients,
    rehearse: Callable[[Reducer], None],
    chosen: str | None = None,
    announce: Callable[[Choice], None] | None = None,
) -> Reducer:
    """The reducer that the configuration names or, for ``auto``, the one that is fastest here. Collective.

    Args:
        config: the run file's section.
        world: the ranks.
        flat: how gradients are joined.
        rehearse: runs forward, backward and ``sum`` once with the reducer it gets, and leaves the model as it was.
        chosen: the name of an earlier choice, which is kept without measuring.
        announce: told what was measured, where there was a choice.
    """
    length = flat.layout.length
    if chosen is not None and world.data.size > 1:
        return open_reducer(Candidate.parse(chosen), world.data, length)
    among = possible(config, world)
    if len(among) == 1:
        return open_reducer(among[0], world.data, length)
    choice = choose(among, _Rehearsal(world.data, length, rehearse), world.data)
    if announce is not None:
        announce(choice)
    return open_reducer(choice.candidate, world.data, length)


class _Rehearsal:
    def __init__(self, group: Group, length: int, step: Callable[[Reducer], None]) -> None:
        self.group, self.length, self.step = group, length, step
        self.reducer: Reducer = NoReducer()

    def open(self, candidate: Candidate) -> None:
        self.reducer = open_reducer(candidate, self.group, self.length)

    def run(self) -> None:
        self.step(self.reducer)

    def close(self) -> None:
        self.reducer.close()


def possible(config: ReduceConfig, world: World) -> list[Candidate]:
    """What may be chosen from on these ranks; raises UserError where the configuration cannot be met. Collective.

    Gradients are sent after backward, never during it: the monitor needs to know when a rank has finished its own work.
    """
    if config.overlap == "on":
        raise UserError(
            "reduce.overlap is on, but Keras gradients travel after the backward pass",
            "leave reduce.overlap at auto",
        )
    gpu = bool(tf.config.list_logical_devices("GPU"))
    around = look_around(config, world, gpu, lambda: horovod_setup.available("tensorflow"))
    return candidates(replace(config, overlap="off"), around)


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
