"""Host-side collectives of a group of ranks: small values as JSON, arrays in place, every wait with an end."""

from __future__ import annotations

import json
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
"""Longest wait for the other ranks if the caller names none: start-up on a busy shared file system takes minutes."""
MOST_COUNTED_S = 0.1
"""Of the time between two looks at a wait: a process that was suspended, as Slurm does, has not waited."""
QUICK_LOOKS = 200
"""At a meeting, some 0.1 ms, before any at the clock and before the core is left to others: looking at the clock adds a
fifth to the time of a quick meeting, and a framework's idle threads keep a core that is left to them for 60 us."""
LARGEST_BYTES = 1 << 30
"""Of one message: MPI counts are 32-bit before MPI 4."""

Arrays = Mapping[str, NDArray[Any]]


class Group:
    """Ranks that act together. Without a communicator it is a group of one, and every collective returns at once.

    Values travel as JSON, never as pickles. All calls are collective: every rank of the group makes them in the same
    order, from its main thread. Each takes ``what``, which completes the sentence "rank 3 waited 900 s for the other
    ranks to ...", and ``timeout_s``, the seconds after which it raises RunFailed with that sentence.

    Args:
        name: of the group, for people.
        comm: an mpi4py communicator that nothing else uses.
    """

    def __init__(self, name: str, comm: MPI.Comm | None = None) -> None:
        self.name = name
        self.comm = comm
        self.rank: int = comm.Get_rank() if comm else 0
        self.size: int = comm.Get_size() if comm else 1

    def barrier(self, what: str = "come to a barrier", timeout_s: float = TIMEOUT_S) -> None:
        """Returns when every rank has arrived.

        Args:
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        if self.comm:
            self._wait(self.comm.Ibarrier(), what, timeout_s)

    def meet(self, what: str = "come to a barrier", timeout_s: float = TIMEOUT_S) -> None:
        """A barrier that ends within microseconds of the last arrival. It does not sleep, but soon leaves its core to
        whoever can use it: loaders and writers, or a rank that has not arrived yet.

        Args:
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        if self.comm:
            self._wait_awake(self.comm.Ibarrier(), what, timeout_s)

    def same(self, number: int, what: str = "compare a number", timeout_s: float = TIMEOUT_S) -> bool:
        """Whether all ranks gave the same number. It waits as ``meet`` does.

        Args:
            number: this rank's.
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
            value: anything JSON can hold.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        if not self.comm:
            return [value]
        mine = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        sizes = np.zeros(self.size, dtype=np.int64)
        self._wait(self.comm.Iallgather(np.array([mine.size], dtype=np.int64), sizes), what, timeout_s)
        everything = np.empty(int(sizes.sum()), dtype=np.uint8)
        self._wait(self.comm.Iallgatherv(mine, (everything, sizes.tolist())), what, timeout_s)
        ends = np.cumsum(sizes)
        return [json.loads(everything[end - n : end].tobytes()) for end, n in zip(ends, sizes, strict=True)]

    def allgather_array(
        self, values: NDArray[Any], what: str = "gather arrays", timeout_s: float = TIMEOUT_S
    ) -> NDArray[Any]:
        """The arrays of all ranks, joined along their first axis in rank order.

        Args:
            values: of the same dtype and shape on every rank, but for the length of the first axis.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.

        Returns:
            A new array.

        Raises:
            RunFailed: the arrays do not fit together, or are more than 1 GiB.
        """
        if not self.comm:
            return np.array(values)
        told = self.allgather([list(values.shape), values.dtype.str], what, timeout_s)
        shapes = [shape for shape, _ in told]
        if any(shape[1:] != shapes[0][1:] or kind != told[0][1] for shape, kind in told):
            kinds = ", ".join(f"{kind}{shape}" for shape, kind in told)
            raise RunFailed(f"arrays of the ranks do not fit together: {kinds}", "give all but the first axis one size")
        out = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), values.dtype)
        if out.nbytes > LARGEST_BYTES:
            raise RunFailed(f"the arrays of all ranks together have {out.nbytes} bytes", "gather 1 GiB at most")
        row = out.nbytes // max(len(out), 1)
        sizes = [shape[0] * row for shape in shapes]
        mine = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._wait(self.comm.Iallgatherv(mine, (out.reshape(-1).view(np.uint8), sizes)), what, timeout_s)
        return out

    def broadcast(
        self, value: Any, what: str = "broadcast a value", root: int = 0, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """The root's value, on every rank.

        Args:
            value: anything JSON can hold; the other ranks' is ignored.
            what: completes "waited for the other ranks to ..." in an error.
            root: rank that has the value.
            timeout_s: seconds after which it raises RunFailed.
        """
        if not self.comm:
            return value
        data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8) if self.rank == root else None
        size = np.array([data.size if data is not None else 0], dtype=np.int64)
        self._wait(self.comm.Ibcast(size, root), what, timeout_s)
        buffer = np.array(data) if data is not None else np.empty(int(size[0]), dtype=np.uint8)
        self._wait(self.comm.Ibcast(buffer, root), what, timeout_s)
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
        """The arrays of all ranks. It does not sleep, but leaves its core to whoever can use it; see ``meet``.

        Args:
            values: numbers, C-contiguous, of the same shape and dtype on every rank.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.

        Returns:
            A new array with a leading axis of ranks, in their order.
        """
        everything = np.empty((self.size, *values.shape), values.dtype)
        if self.comm:
            self._wait(self.comm.Iallgather(values, everything), what, timeout_s, awake_s=timeout_s)
        else:
            everything[0] = values
        return everything

    def join(
        self, values: NDArray[Any], lengths: Sequence[int], what: str = "gather arrays", timeout_s: float = TIMEOUT_S
    ) -> NDArray[Any]:
        """The arrays of all ranks, one behind the other in rank order. Waits as ``meet`` does.

        Args:
            values: numbers, one-dimensional and contiguous, of the same dtype on every rank.
            lengths: of the array of each rank, equal on all ranks.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        everything = np.empty(sum(lengths), values.dtype)
        if self.comm:
            self._wait_awake(self.comm.Iallgatherv(values, (everything, lengths)), what, timeout_s)
        else:
            everything[:] = values
        return everything

    def swap(
        self, going: NDArray[Any], coming: NDArray[Any], what: str = "swap arrays", timeout_s: float = TIMEOUT_S
    ) -> None:
        """Row i of ``going`` goes to rank i; row i of ``coming`` is filled by rank i. Waits as ``meet`` does.

        Args:
            going: a row for each rank, C-contiguous, of the same shape and dtype on every rank.
            coming: of the same shape and dtype, overwritten.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        if self.comm:
            self._wait_awake(self.comm.Ialltoall(going, coming), what, timeout_s)
        else:
            coming[:] = going

    def part(self, name: str, takes_part: bool) -> Group | None:
        """The ranks that take part, in the same order, on a separate communicator; None on the others. Collective.

        Args:
            name: of the new group, for people.
            takes_part: whether this rank does.
        """
        if self.comm is None:
            return Group(name) if takes_part else None
        from mpi4py import MPI

        comm = self.comm.Split(0 if takes_part else MPI.UNDEFINED, self.rank)
        return Group(name, comm) if takes_part else None

    def split(self, name: str, part: int) -> Group:
        """The ranks that name the same part, in the same order, on a separate communicator. Collective.

        Args:
            name: of the new groups, for people.
            part: which one this rank goes to.
        """
        return Group(name, self.comm.Split(part, self.rank) if self.comm else None)

    def add(self, values: NDArray[Any], what: str = "add up arrays", timeout_s: float = TIMEOUT_S) -> None:
        """Replaces an array by its elementwise sum over the ranks, with the same bits on all. Waits as ``meet`` does.

        Args:
            values: numbers, C-contiguous, of the same shape and dtype on every rank.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        self.begin_add(values, what, timeout_s)(True)

    def begin_add(
        self, values: NDArray[Any], what: str = "add up arrays", timeout_s: float = TIMEOUT_S
    ) -> Callable[[bool], bool]:
        """Starts what ``add`` does. The array is to be left alone until it is done.

        Args:
            values: as for ``add``.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which waiting raises RunFailed.

        Returns:
            A function that says whether it is done, after it has waited for that if its argument is true.
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
        """Overwrites an array with the root's, in place.

        Args:
            values: C-contiguous, of the same shape and dtype on every rank.
            what: completes "waited for the other ranks to ..." in an error.
            root: rank that has the values.
            timeout_s: seconds after which it raises RunFailed.
        """
        if self.comm:
            for piece in pieces_of(values):
                self._wait(self.comm.Ibcast(piece, root), what, timeout_s)

    def post(self, values: NDArray[Any], rank: int, tag: int) -> Callable[[], bool]:
        """Starts to send an array. Not collective: the other rank calls ``fetch``.

        Args:
            values: C-contiguous; to be left as it is until it has been sent.
            rank: that gets it.
            tag: of all messages of one kind, which arrive in order.

        Returns:
            A function that says, without waiting, whether it has been sent.
        """
        assert self.comm, "there is another rank"
        from mpi4py import MPI

        requests = [self.comm.Isend(piece, rank, tag) for piece in pieces_of(values)]
        return lambda: MPI.Request.Testall(requests)

    def fetch(self, values: NDArray[Any], rank: int, tag: int, what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Fills an array with what a rank has sent by ``post``. It waits as ``meet`` does.

        Args:
            values: C-contiguous, of the shape and dtype that were sent.
            rank: that sends it.
            tag: as it was sent.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.
        """
        assert self.comm, "there is another rank"
        for piece in pieces_of(values):
            self._wait_awake(self.comm.Irecv(piece, rank, tag), what, timeout_s)

    def merge(
        self, mine: Arrays, add: Callable[[Arrays, Arrays], Arrays], what: str, timeout_s: float = TIMEOUT_S
    ) -> Arrays | None:
        """What the ranks hold, merged by twos: neighbours first, then neighbouring pairs, so that order is kept.

        Args:
            mine: arrays of numbers by name; shapes may differ between ranks.
            add: add(first, second) merges the arrays of ranks with those of the ranks behind them.
            what: completes "waited for the other ranks to ..." in an error.
            timeout_s: seconds after which it raises RunFailed.

        Returns:
            Everything merged, on rank 0; None elsewhere.
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

        Started at one step and taken at the next, it costs neither: everyone has long arrived.

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
            self._wait(request, what, timeout_s)
            return least

        return wait

    def settle(self, requests: Iterable[MPI.Request], what: str, awake_s: float = TIMEOUT_S) -> None:
        """Waits for messages on this communicator, and leaves the core to whoever can use it.

        Args:
            requests: of the messages.
            what: completes "waited for the other ranks to ..." in an error.
            awake_s: seconds of each wait before it sleeps between looks; messages that MPI still has to hand to the
                network, or to take from it, then wait, too.

        Raises:
            RunFailed: it took TIMEOUT_S.
        """
        for request in requests:
            self._wait(request, what, TIMEOUT_S, awake_s)

    def free(self) -> None:
        """Releases the communicator; the group cannot be used after that."""
        if self.comm:
            self.comm.Free()

    def _wait_awake(self, request: MPI.Request, what: str, timeout_s: float) -> None:
        """Polls without sleeping; see QUICK_LOOKS."""
        for _ in range(QUICK_LOOKS):
            if request.Test():
                return
        self._wait(request, what, timeout_s, awake_s=timeout_s)

    def _send(self, arrays: Arrays, rank: int, what: str, timeout_s: float) -> None:
        assert self.comm
        rows = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        head = json.dumps({name: [array.shape, array.dtype.str] for name, array in rows.items()}).encode()
        size = np.array([len(head)], dtype=np.int64)
        messages: list[NDArray[Any]] = [size, np.frombuffer(head, np.uint8), *rows.values()]
        for values in messages:
            for piece in pieces_of(values):
                self._wait(self.comm.Isend(piece, rank), what, timeout_s)

    def _receive(self, rank: int, what: str, timeout_s: float) -> Arrays:
        assert self.comm
        begin = self.comm.Irecv

        def fill(values: NDArray[Any]) -> NDArray[Any]:
            for piece in pieces_of(values):
                self._wait(begin(piece, rank), what, timeout_s)
            return values

        head = json.loads(fill(np.empty(fill(np.empty(1, np.int64))[0], np.uint8)).tobytes())
        return {name: fill(np.empty(shape, np.dtype(kind))) for name, (shape, kind) in head.items()}

    def _wait(self, request: MPI.Request, what: str, timeout_s: float, awake_s: float = 1e-4) -> None:
        """Polls, then sleeps ever longer between looks, so that waiting ranks leave the cores to those that work."""
        last, waited = time.monotonic(), 0.0
        while not request.Test():
            now = time.monotonic()
            waited += min(now - last, MOST_COUNTED_S)
            last = now
            if waited > timeout_s:
                raise RunFailed(
                    f"rank {self.rank} of {self.size} waited {waited:.0f} s for the other ranks to {what}",
                    "look for the rank that never arrived in the logs of the run folder",
                )
            if waited <= awake_s:
                os.sched_yield()
            else:
                time.sleep(min(waited / 20, 0.01))


def pieces_of(values: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a C-contiguous array, in messages that MPI can count."""
    everything = values.reshape(-1).view(np.uint8)
    for begin in range(0, everything.size, LARGEST_BYTES):
        yield everything[begin : begin + LARGEST_BYTES]
