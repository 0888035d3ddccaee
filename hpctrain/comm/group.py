"""Host-side collectives over a group of ranks: small values as JSON, arrays in place; every wait has a timeout."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import RunFailed

if TYPE_CHECKING:
    from mpi4py import MPI

TIMEOUT_S = 900.0
"""Default timeout: start-up on a busy shared file system takes minutes."""
MOST_COUNTED_S = 0.1
"""Longest time between two polls that counts as waiting: a process suspended by Slurm, for example, was not waiting."""
QUICK_LOOKS = 200
"""Polls of a ``meet`` (about 0.1 ms) before it looks at the clock or yields the core. Reading the clock makes a short
wait a fifth longer, and idle threads of a framework keep a yielded core for 60 us."""
LARGEST_BYTES = 1 << 30
"""Largest message: MPI counts are 32-bit before MPI 4."""

Arrays = Mapping[str, NDArray[Any]]


class Group:
    """Ranks that act together. Without a communicator it is a group of one, and every collective returns at once.

    Values are sent as JSON, never pickled. All calls are collective: every rank of the group makes them in the same
    order, from its main thread. Each takes ``what``, which completes the sentence "rank 3 waited 900 s for the other
    ranks to ...", and ``timeout_s``, after which it raises RunFailed with that sentence.

    Args:
        name: name of the group, for messages.
        comm: an mpi4py communicator that nothing else uses.
    """

    def __init__(self, name: str, comm: MPI.Comm | None = None) -> None:
        self.name = name
        self.comm = comm
        self.rank: int = comm.Get_rank() if comm else 0
        self.size: int = comm.Get_size() if comm else 1

    def barrier(self, what: str = "reach a barrier", timeout_s: float = TIMEOUT_S) -> None:
        """Returns when every rank has arrived.

        Args:
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        if self.comm:
            self.wait_until(self.comm.Ibarrier().Test, what, timeout_s)

    def meet(self, what: str = "reach a barrier", timeout_s: float = TIMEOUT_S) -> None:
        """A barrier that returns within microseconds of the last arrival. It never sleeps, but soon starts to yield its
        core to other threads and processes, such as loaders, writers, or a rank that has not arrived yet.

        Args:
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        if self.comm:
            self._wait_awake(self.comm.Ibarrier(), what, timeout_s)

    def same(self, number: int, what: str = "compare a number", timeout_s: float = TIMEOUT_S) -> bool:
        """Whether all ranks passed the same number. Waits like ``meet``.

        Args:
            number: this rank's number.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        if not self.comm:
            return True
        from mpi4py import MPI

        extremes = np.array([number, -number], np.int64)
        self._wait_awake(self.comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MIN), what, timeout_s)
        return bool(extremes[0] == -extremes[1])

    def allgather(self, value: Any, what: str = "gather values", timeout_s: float = TIMEOUT_S) -> list[Any]:
        """The values of all ranks, in rank order.

        Args:
            value: anything that JSON can represent, or a NumPy scalar.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        if not self.comm:
            return [value]
        mine = np.frombuffer(to_json(value), dtype=np.uint8)
        sizes = np.zeros(self.size, dtype=np.int64)
        self.wait_until(self.comm.Iallgather(np.array([mine.size], dtype=np.int64), sizes).Test, what, timeout_s)
        everything = np.empty(int(sizes.sum()), dtype=np.uint8)
        self.wait_until(self.comm.Iallgatherv(mine, (everything, sizes.tolist())).Test, what, timeout_s)
        ends = np.cumsum(sizes)
        return [json.loads(everything[end - n : end].tobytes()) for end, n in zip(ends, sizes, strict=True)]

    def allgather_array(
        self, values: NDArray[Any], what: str = "gather arrays", timeout_s: float = TIMEOUT_S
    ) -> NDArray[Any]:
        """Concatenates the arrays of all ranks along their first axis, in rank order.

        Args:
            values: array with the same dtype and shape on every rank, except for the length of the first axis.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.

        Returns:
            A new array.

        Raises:
            RunFailed: the arrays do not fit together, or exceed 1 GiB in total.
        """
        if not self.comm:
            return np.array(values)
        described = self.allgather([list(values.shape), values.dtype.str], what, timeout_s)
        shapes = [shape for shape, _ in described]
        if any(shape[1:] != shapes[0][1:] or kind != described[0][1] for shape, kind in described):
            kinds = ", ".join(f"{kind}{shape}" for shape, kind in described)
            raise RunFailed(f"arrays of the ranks do not fit together: {kinds}", "give all but the first axis one size")
        lengths = [math.prod(shape) for shape in shapes]
        if (total := sum(lengths) * values.itemsize) > LARGEST_BYTES:
            raise RunFailed(f"the arrays of all ranks together have {total} bytes", "gather 1 GiB at most")
        everything = self.join(np.ascontiguousarray(values).reshape(-1), lengths, what, timeout_s)
        return everything.reshape(sum(shape[0] for shape in shapes), *shapes[0][1:])

    def broadcast(
        self, value: Any, what: str = "broadcast a value", root: int = 0, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """The root's value, on every rank.

        Args:
            value: anything that JSON can represent, or a NumPy scalar; ignored on the other ranks.
            what: completes "waited for the other ranks to ..." in an error.
            root: rank that has the value.
            timeout_s: seconds after which it raises RunFailed.
        """
        if not self.comm:
            return value
        data = np.frombuffer(to_json(value), dtype=np.uint8) if self.rank == root else None
        size = np.array([data.size if data is not None else 0], dtype=np.int64)
        self.wait_until(self.comm.Ibcast(size, root).Test, what, timeout_s)
        buffer = np.array(data) if data is not None else np.empty(int(size[0]), dtype=np.uint8)
        self.wait_until(self.comm.Ibcast(buffer, root).Test, what, timeout_s)
        return json.loads(buffer.tobytes())

    def sum(self, values: NDArray[Any], what: str = "add up arrays", timeout_s: float = TIMEOUT_S) -> NDArray[Any]:
        """Elementwise sum over the ranks.

        Args:
            values: numbers, of the same shape and dtype on every rank.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.

        Returns:
            A new array.
        """
        total = np.array(values, order="C")
        self.add(total, what, timeout_s)
        return total

    def gather(self, values: NDArray[Any], what: str = "gather arrays", timeout_s: float = TIMEOUT_S) -> NDArray[Any]:
        """Gathers an array from every rank. Never sleeps, but yields its core; see ``meet``.

        Args:
            values: numbers, C-contiguous, of the same shape and dtype on every rank.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.

        Returns:
            A new array with a leading axis of ranks, in rank order.
        """
        everything = np.empty((self.size, *values.shape), values.dtype)
        if self.comm:
            self.wait_until(self.comm.Iallgather(values, everything).Test, what, timeout_s, awake_s=timeout_s)
        else:
            everything[0] = values
        return everything

    def join(
        self, values: NDArray[Any], lengths: Sequence[int], what: str = "gather arrays", timeout_s: float = TIMEOUT_S
    ) -> NDArray[Any]:
        """Concatenates one-dimensional arrays of known lengths in rank order. Waits like ``meet``.

        Args:
            values: numbers, one-dimensional and contiguous, of the same dtype on every rank.
            lengths: length of each rank's array, the same on all ranks.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        everything = np.empty(sum(lengths), values.dtype)
        if self.comm:
            self._wait_awake(self.comm.Iallgatherv(values, (everything, lengths)), what, timeout_s)
        else:
            everything[:] = values
        return everything

    def part(self, name: str, takes_part: bool) -> Group | None:
        """A group of the ranks that take part, in the same order, on a new communicator; None elsewhere. Collective.

        Args:
            name: name of the new group, for messages.
            takes_part: whether this rank takes part.
        """
        if self.comm is None:
            return Group(name) if takes_part else None
        from mpi4py import MPI

        comm = self.comm.Split(0 if takes_part else MPI.UNDEFINED, self.rank)
        return Group(name, comm) if takes_part else None

    def split(self, name: str, part: int) -> Group:
        """A group of the ranks that pass the same ``part``, in the same order, on a new communicator. Collective.

        Args:
            name: name of the new groups, for messages.
            part: number of this rank's new group.
        """
        return Group(name, self.comm.Split(part, self.rank) if self.comm else None)

    def split_by(self, name: str, part_of: Callable[[int], int]) -> Group:
        """The same for a function of the rank that all ranks pass. Collective."""
        return self.split(name, part_of(self.rank))

    def add(self, values: NDArray[Any], what: str = "add up arrays", timeout_s: float = TIMEOUT_S) -> None:
        """Replaces an array by its elementwise sum over the ranks, bitwise equal on all. Waits like ``meet``.

        Args:
            values: numbers, C-contiguous, of the same shape and dtype on every rank.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        self.begin_add(values, what, timeout_s)(True)

    def begin_add(
        self, values: NDArray[Any], what: str = "add up arrays", timeout_s: float = TIMEOUT_S
    ) -> Callable[[bool], bool]:
        """Starts ``add`` without waiting. Do not touch the array until it is done.

        Args:
            values: as for ``add``.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which waiting raises RunFailed.

        Returns:
            A function that says whether the sum is done; if its argument is True, it waits for that first.
        """
        if not self.comm:
            return lambda wait: True
        from mpi4py import MPI

        left = [self.comm.Iallreduce(MPI.IN_PLACE, piece.view(values.dtype)) for piece in pieces_of(values)]

        def is_done(wait: bool) -> bool:
            while left and (wait or left[0].Test()):
                if wait:
                    self._wait_awake(left[0], what, timeout_s)
                left.pop(0)
            return not left

        return is_done

    def broadcast_array(
        self, values: NDArray[Any], what: str = "broadcast an array", root: int = 0, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Overwrites an array with the root's.

        Args:
            values: C-contiguous, of the same shape and dtype on every rank.
            what: completes "waited for the other ranks to ..." in an error.
            root: rank that has the values.
            timeout_s: seconds after which it raises RunFailed.
        """
        if self.comm:
            for piece in pieces_of(values):
                self.wait_until(self.comm.Ibcast(piece, root).Test, what, timeout_s)

    def post(self, values: NDArray[Any], rank: int, tag: int) -> Callable[[], bool]:
        """Starts to send an array. Not collective: the other rank calls ``fetch``.

        Args:
            values: C-contiguous array; do not change it until it has been sent.
            rank: rank that receives it.
            tag: identifies one kind of message; messages with the same tag arrive in order.

        Returns:
            A function that says, without waiting, whether the array has been sent.
        """
        assert self.comm, "there is another rank"
        from mpi4py import MPI

        requests = [self.comm.Isend(piece, rank, tag) for piece in pieces_of(values)]
        return lambda: MPI.Request.Testall(requests)

    def fetch(self, values: NDArray[Any], rank: int, tag: int, what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Receives into an array what another rank sent by ``post``. Waits like ``meet``.

        Args:
            values: C-contiguous array with the shape and dtype that were sent.
            rank: rank that sends it.
            tag: the tag of ``post``.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        assert self.comm, "there is another rank"
        for piece in pieces_of(values):
            self._wait_awake(self.comm.Irecv(piece, rank, tag), what, timeout_s)

    def merge(
        self, mine: Arrays, add: Callable[[Arrays, Arrays], Arrays], what: str, timeout_s: float = TIMEOUT_S
    ) -> Arrays | None:
        """Merges the data of all ranks in a binary tree, neighbours first, so that rank order is kept.

        Args:
            mine: arrays of numbers by name; shapes may differ between ranks.
            add: add(first, second) merges the data of some ranks with that of the ranks after them.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.

        Returns:
            The merged data on rank 0; None elsewhere.
        """
        distance = 1
        while distance < self.size:
            if self.rank % (2 * distance):
                self._send(mine, self.rank - distance, what, timeout_s)
                return None
            if self.rank + distance < self.size:
                mine = add(mine, self._receive(self.rank + distance, what, timeout_s))
            distance *= 2
        return mine

    def begin_min(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> Callable[[], NDArray[Any]]:
        """Starts an elementwise minimum over the ranks.

        If it is started at one step and taken at the next, it costs no time: all ranks have arrived long before.

        Args:
            values: numbers, of the same shape and dtype on every rank.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.

        Returns:
            A function that waits for the minimum and returns it.
        """
        least = np.array(values)
        if not self.comm:
            return lambda: least
        from mpi4py import MPI

        request = self.comm.Iallreduce(MPI.IN_PLACE, least, MPI.MIN)

        def wait() -> NDArray[Any]:
            self.wait_until(request.Test, what, timeout_s)
            return least

        return wait

    def settle(self, requests: Iterable[MPI.Request], what: str, awake_s: float = TIMEOUT_S) -> None:
        """Waits for messages on this communicator, yielding the core meanwhile.

        Args:
            requests: requests of the messages.
            what: completes "waited for the other ranks to ..." in an error.
            awake_s: how long each wait polls before it sleeps between polls; while it sleeps, MPI makes no progress
                with other messages either.

        Raises:
            RunFailed: a wait took longer than TIMEOUT_S.
        """
        for request in requests:
            self.wait_until(request.Test, what, TIMEOUT_S, awake_s)

    def free(self) -> None:
        """Releases the communicator; the group cannot be used after that."""
        if self.comm:
            self.comm.Free()

    def _wait_awake(self, request: MPI.Request, what: str, timeout_s: float) -> None:
        """Polls without sleeping; see QUICK_LOOKS."""
        for _ in range(QUICK_LOOKS):
            if request.Test():
                return
        self.wait_until(request.Test, what, timeout_s, awake_s=timeout_s)

    def _send(self, arrays: Arrays, rank: int, what: str, timeout_s: float) -> None:
        rows = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        head = json.dumps({name: [array.shape, array.dtype.str] for name, array in rows.items()}).encode()
        messages: list[NDArray[Any]] = [np.array([len(head)], np.int64), np.frombuffer(head, np.uint8), *rows.values()]
        sent = [self.post(values, rank, 0) for values in messages]
        self.wait_until(lambda: all(done() for done in sent), what, timeout_s)

    def _receive(self, rank: int, what: str, timeout_s: float) -> Arrays:
        def fill(values: NDArray[Any]) -> NDArray[Any]:
            self.fetch(values, rank, 0, what, timeout_s)
            return values

        head = json.loads(fill(np.empty(fill(np.empty(1, np.int64))[0], np.uint8)).tobytes())
        return {name: fill(np.empty(shape, np.dtype(kind))) for name, (shape, kind) in head.items()}

    def wait_until(
        self,
        done: Callable[[], bool],
        what: str,
        timeout_s: float = TIMEOUT_S,
        awake_s: float = 1e-4,
        pause_s: float | None = None,
    ) -> None:
        """Polls, then sleeps for ever longer intervals, so that waiting ranks leave the cores to working ones.

        With ``pause_s``, it sleeps that long between polls from the start.

        Raises:
            RunFailed: ``done`` has not returned true within ``timeout_s`` seconds.
        """
        last, waited = time.monotonic(), 0.0
        while not done():
            now = time.monotonic()
            waited += min(now - last, MOST_COUNTED_S)
            last = now
            if waited > timeout_s:
                raise RunFailed(
                    f"rank {self.rank} of {self.size} waited {waited:.0f} s for the other ranks to {what}",
                    "look for the rank that never arrived in the logs of the run folder",
                )
            if pause_s is None and waited <= awake_s:
                os.sched_yield()
            else:
                time.sleep(pause_s or min(waited / 20, 0.01))


def to_json(value: Any) -> bytes:
    """A value as JSON; NumPy's scalars as Python's. Raises TypeError for what JSON cannot represent."""
    return json.dumps(value, default=np.generic.item).encode()


def pieces_of(values: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a C-contiguous array, split into messages that MPI can count."""
    assert values.flags.c_contiguous, "otherwise these are the bytes of a copy"
    everything = values.reshape(-1).view(np.uint8)
    for begin in range(0, everything.size, LARGEST_BYTES):
        yield everything[begin : begin + LARGEST_BYTES]
