"""Saves during training: takes a snapshot between steps, writes it in the background, commits when all ranks have.

The background thread makes no MPI calls. The ranks agree on their ``vote()`` and pass the result to ``advance()``, so
that all enter the next stage at the same point of the program.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hpctrain.checkpoint.checkpoint_folder import CheckpointFolder
from hpctrain.checkpoint.format.boxes import Coordinates
from hpctrain.checkpoint.format.layout import named_apart, shard_file
from hpctrain.checkpoint.format.paced_write import Dropped
from hpctrain.checkpoint.format.shard import ShardImage, Skeleton, host_buffer, skeleton
from hpctrain.checkpoint.writer_shares import place_in, share_of
from hpctrain.comm.step_vote import SaveVote, StepVote
from hpctrain.errors import Code, HpctrainError, NoRequeue, Replaced, RunFailed, code_of
from hpctrain.system.array_types import Array, Bytes
from hpctrain.train.framework import SPOILED_FIX
from hpctrain.train.state import ArrayTensor, Cut, Placement, StateTensor, Tiling

LEAST_SPARE_BYTES = 64 << 10
"""Minimum free space that a checkpoint must leave for its manifest and other files of the run."""
MORE_SPARE_BYTES = 16 << 20
"""Additional free space that large checkpoints must leave, at most."""
WRITE_TIMEOUT_S = 24 * 3600.0
"""Timeout for other ranks' writes; long, because the monitor detects hangs, and a slow disk is not one."""
LAYOUT = attrgetter("name", "shape", "dtype", "placement", "cut", "tiling")
"""The properties that determine where a tensor is stored."""
FINAL = (Code.IN_USE, Code.NAN)
"""Codes after which no later save of the attempt can succeed, by precedence."""


class SaveStage(Enum):
    """Stages of a checkpoint in flight; the value is what it waits for."""

    WRITING = "every rank's shard"
    COMMITTING = "the commit by each folder's first rank"
    ABANDONING = "its removal"


@dataclass(frozen=True)
class SaveResult:
    """How a save ended; the same on all ranks except for times and bytes."""

    step: int
    path: Path
    num_bytes: int
    """Bytes written to the folder; 0 except on its first rank."""
    stall_s: float
    """Seconds that this rank's training was interrupted."""
    write_s: float
    """Seconds from the snapshot to the commit on this rank."""
    error: str | None = None
    """Why the save failed, by rank; None if it succeeded."""
    code: Code | None = None
    """The error code."""
    is_dropped: bool = False
    """Whether it was dropped on purpose (``Saver.drop``)."""

    @property
    def is_final(self) -> bool:
        """Whether no later save of this attempt can succeed: it was replaced, or its weights are not finite."""
        return self.code in FINAL

    def path_or_raise(self) -> Path:
        """The checkpoint's folder.

        Raises:
            Replaced: a newer attempt has begun.
            NoRequeue: the save failed and would fail again.
            RunFailed: the save failed.
        """
        what = f"the checkpoint of step {self.step} was not written: {self.error}"
        if self.code is Code.IN_USE:
            raise Replaced(what)
        if self.code is Code.NAN:
            raise NoRequeue(what, SPOILED_FIX, Code.NAN)
        if self.error:
            raise RunFailed(what, "free space or look for I/O errors; older checkpoints are untouched", self.code)
        return self.path


@dataclass
class SaveJob:
    """The checkpoint in flight."""

    step: int
    meta: Mapping[str, Any]
    partial: Path
    begin: float
    stall_s: float
    image: ShardImage | None
    """The snapshot; None if it could not be taken."""
    problem: Exception | None = None
    """Why the snapshot could not be taken."""
    stage: SaveStage = SaveStage.WRITING
    future: Future[Any] = field(default_factory=Future)
    """This rank's background work in the current stage."""
    dropped: Event = field(default_factory=Event)
    """Set if writing should stop."""
    failure: Failure | None = None


@dataclass(frozen=True)
class Failure:
    """Why a job failed, over all ranks."""

    error: str
    code: Code
    is_dropped: bool


class Saver:
    """Saves a run's checkpoints, one in flight at a time. Create it with ``open_saver``.

    Args:
        folder: where to save; its ranks call every method in the same order.
        writers: ranks of the group that split the writing of replicated state. Each rank writes its rank-local state.
        token: distinguishes this saver's partial folders from those of others; equal on all ranks.
        allocate: returns contiguous uint8 staging memory of a number of bytes (pinned, for GPUs).
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        writers: Sequence[int],
        token: str,
        allocate: Callable[[int], Bytes] = host_buffer,
    ) -> None:
        self.folder = folder
        self.group = folder.group
        self.writers = tuple(writers)
        self.token = token
        self.allocate = allocate
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.count = 0
        self.layout: list[tuple[str, tuple[int, ...], str, Placement, Cut | None, Tiling | None]] = []
        """LAYOUT of each tensor in the last plan; if it changes, the shard is planned again."""
        self.sources: list[tuple[int, Coordinates]] = []
        """For each piece that this rank writes: index of its tensor, and the piece's start in that tensor."""
        self.trained: frozenset[str] = frozenset()
        """Names of the tensors that must be finite."""
        self.total_bytes = 0
        self.plan: Skeleton | None = None
        """This rank's shard file without values."""
        self.images: list[ShardImage] = []
        """Staging memory: a second one is added if a snapshot waits for the one in flight, or if images are files."""
        self.kept: ShardImage | None = None
        """The image that is the newest checkpoint's file, if images are files."""
        self.job: SaveJob | None = None
        """The checkpoint in flight."""
        self.waiting: SaveJob | None = None
        """A snapshot that is written after the one in flight."""
        self.sound: set[int] = set()
        """Steps of the checkpoints known to be sound."""
        self.protected: set[int] = set()
        """Steps that retention must not remove."""

    def protect(self, steps: Collection[int]) -> None:
        """Set the checkpoints that retention must not remove; replaces the previous set."""
        self.protected = set(steps)

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is in flight."""
        return self.job is None

    def prepare(self, tensors: Sequence[StateTensor]) -> ShardImage:
        """Free staging memory for this rank's shard, allocated if the layout has changed or all of it is in use.

        Raises:
            UserError: names or types cannot be stored (the same on all ranks).
            MemoryError, OSError, RunFailed: memory or space for staging is missing.
        """
        layout = list(map(LAYOUT, tensors))
        if self.plan is None or layout != self.layout:
            self.plan = None
            self.images.clear()  # free the old staging memory before the new is allocated
            sources, self.total_bytes = share_of(
                tensors, self.group, self.folder.peers, self.folder.copies, self.writers
            )
            sources.sort(key=lambda source: source[1].num_bytes)  # else libhdf5 searches all gaps for each small one
            self.sources = [(index, place_in(tensors[index].cut, piece)) for index, piece in sources]
            self.trained = frozenset(tensor.name for tensor in tensors if tensor.is_trained)
            self.plan = skeleton(named_apart([piece for _, piece in sources]))
            self.layout = layout
        used = (self.job.image if self.job else None, self.kept)
        free = next((image for image in self.images if image not in used), None)
        if free is None:
            free = self.folder.image(self.plan, self.allocate, len(self.images))
            self.images.append(free)
        return free

    def begin(
        self,
        tensors: Sequence[StateTensor],
        step: int,
        meta: Mapping[str, Any],
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a snapshot and start to write it. Returns when ``tensors`` may change again; not collective.

        If a checkpoint is in flight, the snapshot waits in separate memory until that one has ended, and replaces any
        earlier snapshot that is waiting.

        Args:
            tensors: the whole state, in the same order on all ranks.
            step: number of the checkpoint.
            meta: JSON values; rank 0's are stored.
            synchronize: waits until asynchronous copies to staging memory have completed.

        Raises:
            UserError: names or types cannot be stored (the same on all ranks).
        """
        begin = time.monotonic()
        self.count += 1
        partial = self.folder.partial(step, f"{self.token}-{self.count}")
        image, problem = None, None
        try:
            image = self.prepare(tensors)
            for (source, begin_there), view in zip(self.sources, image.views, strict=True):
                tensors[source].copy_into(view, begin_there)
            synchronize()
        except (MemoryError, OSError, RunFailed) as error:
            image, problem = None, error
        job = SaveJob(step, meta, partial, begin, time.monotonic() - begin, image, problem)
        if self.job:
            self.waiting = job
        else:
            self._start(job)

    def drop(self, wanted: Collection[int]) -> None:
        """Abandon the checkpoint in flight unless all ranks have written it; all ranks call this, then ``finish``.

        Args:
            wanted: steps whose checkpoint is not abandoned.
        """
        if self.job and self.job.stage is SaveStage.WRITING and self.job.step not in wanted:
            self.job.dropped.set()

    def vote(self, is_late: bool = False) -> SaveVote:
        """This rank's vote; ``is_late`` if a save is due by its clock."""
        return SaveVote.on(self.job.future if self.job else None, is_late and self.idle)

    def advance(self, agreed: SaveVote) -> SaveResult | None:
        """Enter the next stage if all ranks have finished the current one; returns the result after the last stage.

        The ranks agreed since the last change of stage. Communicates only if a rank failed.
        """
        job = self.job
        if job is None or not agreed.finished:
            return None
        if not agreed.sound and job.stage is not SaveStage.ABANDONING:
            job.failure = self._reasons(job)
            self._enter(job, SaveStage.ABANDONING, self.folder.discard, job.partial)
            return None
        if job.stage is SaveStage.WRITING:
            self._enter(job, SaveStage.COMMITTING, self._commit, job.step, job.partial, job.meta)
            return None
        return self._end(job)

    def poll(self) -> SaveResult | None:
        """Advance the checkpoint in flight; returns its result if it ended. Collective; waits for the other ranks."""
        vote = StepVote(checkpoint=self.vote()).begin(self.group, "finish the checkpoint", WRITE_TIMEOUT_S)
        return self.advance(vote().checkpoint)

    def finish(self) -> SaveResult:
        """Wait until the checkpoint in flight is committed or abandoned. Collective."""
        while True:
            assert self.job is not None, "a checkpoint is in flight"
            self.job.future.exception()
            if outcome := self.poll():
                return outcome

    def rest(self) -> None:
        """Wait until the background thread is idle."""
        self.thread.submit(int).result()

    def close(self) -> None:
        """End the thread after its queued work. A checkpoint in flight is not written further; it stays uncommitted."""
        if self.job:
            self.job.dropped.set()
        self.thread.shutdown(wait=True)

    def _start(self, job: SaveJob) -> None:
        """Put a snapshot in flight."""
        self.job = job
        if job.image is None:
            job.future.set_exception(job.problem)
        else:
            job.future = self.thread.submit(self._write, job.image, job.partial, job.dropped.is_set)

    def _write(self, image: ShardImage, partial: Path, is_dropped: Callable[[], bool]) -> None:
        """Write this rank's shard, in the background."""
        if spoiled := image.first_not_finite(self.trained):
            fix = "weights that a run could not resume from are not saved"
            raise NoRequeue(f"{spoiled} is not finite", fix, Code.NAN)
        self.folder.prepare_folder(partial)
        if not image.keeps:
            self._require_space(partial, image.buffer.size)
        shard = partial / shard_file(self.group.rank, self.group.size)
        image.write(shard, is_dropped, self.folder.file_mode)
        self.folder.copy(shard)

    def _require_space(self, partial: Path, own_bytes: int) -> None:
        """Raise RunFailed if space is missing, for one shard, or on a folder's first rank for all missing shards."""
        missing = own_bytes
        here = self.total_bytes * self.folder.local.size // self.group.size
        if self.folder.local.rank == 0:  # others may have begun to write; only one rank, to spare the file server
            missing = max(own_bytes, here - sum(entry.stat().st_size for entry in os.scandir(partial)))
        self.folder.require_room(partial, missing + spare_bytes(here))

    def _commit(self, step: int, partial: Path, meta: Mapping[str, Any]) -> int:
        """Commit, on a folder's first rank, in the background; returns the bytes written to the folder."""
        is_cut = any(placement is Placement.CUT for _, _, _, placement, *_ in self.layout)
        owners = self.folder.peers.size
        num_bytes = self.folder.commit(partial, step, self.group.size, meta, looks_through=is_cut, owners=owners)
        self.sound.add(step)
        return num_bytes

    def _clear(self) -> None:
        """Remove checkpoints that are no longer kept, on a folder's first rank, in the background."""
        protected = self.protected | {max(self.sound)}
        with suppress(OSError, HpctrainError):  # retried after the next save
            for old in self.folder.keep.removable(self.folder.steps(), protected):
                self.folder.remove(old)

    def _enter(self, job: SaveJob, stage: SaveStage, work: Callable[..., Any], *arguments: Any) -> None:
        """Start the next stage's work on a folder's first rank; other ranks have nothing to do."""
        job.stage = stage
        job.future = self.thread.submit(work, *arguments) if self.folder.local.rank == 0 else self.thread.submit(int)

    def _end(self, job: SaveJob) -> SaveResult:
        """End the job and start the one that is waiting, if any."""
        num_bytes = job.future.result() if job.stage is SaveStage.COMMITTING else 0
        if not job.failure and job.image and job.image.keeps:
            self.kept = job.image
        if self.folder.local.rank == 0 and not job.failure:
            self.thread.submit(self._clear)
        outcome = SaveResult(
            job.step, self.folder.folder(job.step), num_bytes, job.stall_s, time.monotonic() - job.begin
        )
        self.job, waiting, self.waiting = None, self.waiting, None
        if waiting:
            self._start(replace(waiting, begin=time.monotonic() - waiting.stall_s))
        return replace(outcome, **vars(job.failure)) if job.failure else outcome

    def _reasons(self, job: SaveJob) -> Failure:
        """Gather the errors of all ranks and choose the most important code. Collective."""
        error = self._replacement() or job.future.exception()
        mine = error.what if isinstance(error, HpctrainError) else str(error) or type(error).__name__
        problem = [mine, code_of(error), isinstance(error, Dropped)] if error else None
        problems = self.group.allgather(problem, "say why the checkpoint failed")
        reasons = [f"rank {rank}: {each[0]}" for rank, each in enumerate(problems) if each]
        codes = [Code.read(each[1]) for each in problems if each]
        return Failure(
            error="; ".join(reasons),
            code=next((code for code in (*FINAL, Code.DISK_FULL) if code in codes), codes[0]),
            is_dropped=all(each[2] for each in problems if each),
        )

    def _replacement(self) -> Replaced | None:
        """On rank 0, the error if a newer attempt has begun, which may have removed the partial checkpoint."""
        try:
            if self.group.rank == 0:
                self.folder.fence()
        except Replaced as replaced:
            return replaced
        except OSError:  # the fence cannot be read now
            pass
        return None


def spare_bytes(num_bytes: int) -> int:
    """Free space in bytes that a checkpoint of this size must leave."""
    return LEAST_SPARE_BYTES + min(MORE_SPARE_BYTES, num_bytes // 8)


def array_tensors(arrays: Mapping[str, ArrayLike], rank_arrays: Mapping[str, ArrayLike]) -> list[ArrayTensor]:
    """Make state tensors from host arrays, replicated ones first.

    Args:
        arrays: replicated arrays by name, equal on all ranks; slashes create groups.
        rank_arrays: rank-local arrays by name.
    """
    return [
        *(ArrayTensor(name, host_array(array)) for name, array in arrays.items()),
        *(ArrayTensor(name, host_array(array), Placement.RANK) for name, array in rank_arrays.items()),
    ]


def host_array(value: ArrayLike) -> Array:
    """Convert to a NumPy array in native byte order."""
    array = np.asarray(value)
    return array.astype(array.dtype.newbyteorder("="), copy=False)
