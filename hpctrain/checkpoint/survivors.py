"""Snapshots whose shards are spread over nodes: finds those that the current nodes have whole, and completes them.

Each node has only some of the shards. Before a snapshot is read, the nodes' first ranks send each other the missing
shards, piece by piece. After that it is a normal checkpoint on every node, for any parallel plan and number of ranks.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpctrain.checkpoint.checkpoint_folder import index_of
from hpctrain.checkpoint.format import manifest as manifest_file
from hpctrain.checkpoint.format.durable_files import created, open_regular, read_at, write_at
from hpctrain.checkpoint.format.layout import MANIFEST_FILE, DamagedCheckpoint, shard_file
from hpctrain.checkpoint.snapshots import HEAD_FILE, shards_here
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.system import cgroups, shared_memory
from hpctrain.system.files import make_private, write_atomically
from hpctrain.system.retry import retry_files

T = TypeVar("T")

PIECE_BYTES = 16 << 20
"""Size of the buffer for transfers on each node."""
MOVE_TIMEOUT_S = 3600.0
"""Timeout for the exchange of shards."""
MOVING = ".moving-"
"""Prefix of a shard that is being received."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot and the nodes that have its shards."""

    folder: Path
    """Its folder on this node, which may not exist."""
    count: int
    """Number of its shards."""
    holders: dict[int, list[int]]
    """Nodes that have each shard, by the shard's number."""

    @property
    def lost(self) -> str | None:
        """Why it is incomplete, or None."""
        missing = self.count - len(self.holders)
        return f"{missing} of its {self.count} shards are not on the nodes of this attempt" if missing else None


def survey(world: World, homes: Sequence[Path], trained: int) -> list[Snapshot]:
    """Find the snapshots in these folders of a run on all nodes. Collective.

    Args:
        world: the ranks.
        homes: the run's folders on this node, in the same order on all nodes.
        trained: number of the oldest attempt to consider.
    """
    here = [shards_here(home, trained) for home in homes] if world.local_rank == 0 else None
    gathered = world.everyone.allgather(here, "list the snapshots")
    of_nodes = [each for each in gathered if each is not None]  # nodes are numbered in the order of their first ranks
    found: dict[tuple[int, str], Snapshot] = {}
    for node, of_node in enumerate(of_nodes):
        for index, of_home in enumerate(of_node):
            for place, (count, *shards) in of_home.items():
                snapshot = found.setdefault((index, place), Snapshot(homes[index] / place, count, {}))
                for shard in shards if count == snapshot.count else ():
                    snapshot.holders.setdefault(shard, []).append(node)
    return list(found.values())


def complete(snapshot: Snapshot, world: World, firsts: Group) -> None:
    """Copy all shards of a snapshot, and its manifest, to every node. Collective.

    Args:
        snapshot: a snapshot that the nodes together have whole.
        world: the ranks.
        firsts: on each node's first rank, the group of these ranks.

    Raises:
        DamagedCheckpoint: it is damaged, or a node has too little space; on all ranks.
    """
    problem = None
    if world.local_rank == 0:
        try:
            exchange(snapshot, firsts)
        except DamagedCheckpoint as error:
            problem = error.what
    gathered = world.everyone.allgather(problem, f"complete {snapshot.folder.name}", MOVE_TIMEOUT_S)
    if problems := [each for each in gathered if each]:
        raise DamagedCheckpoint(problems[0])


def exchange(snapshot: Snapshot, firsts: Group) -> None:
    """Do the work of ``complete`` among the nodes' first ranks. Raises DamagedCheckpoint."""
    folder, holders = snapshot.folder, snapshot.holders
    files = {shard: shard_file(shard, snapshot.count) for shard in range(snapshot.count)}

    def read() -> tuple[str, list[tuple[int, str, int]]]:
        """The head, if this node is the first with shard 0, and each of its shards' number, index and bytes."""
        mine = [shard for shard in files if holders[shard][0] == firsts.rank]
        head = manifest_file.read_bytes(folder / HEAD_FILE).decode() if 0 in mine else ""
        paths = {shard: folder / files[shard] for shard in mine}
        return head, [(shard, index_of(path)[0].decode(), path.stat().st_size) for shard, path in paths.items()]

    found = on_all(firsts, f"list the shards of {folder.name}", read)
    head = "".join(head for head, _ in found)
    shards = sorted(shard for _, of_node in found for shard in of_node)

    def prepare() -> None:
        make_folder(folder, head.encode(), [text.encode() for _, text, _ in shards])
        require_room(folder, sum(size for shard, _, size in shards if firsts.rank not in holders[shard]))

    on_all(firsts, "make room", prepare)
    problems = [
        send(folder / files[shard], firsts, nodes[0], lacks=firsts.rank not in nodes)
        for shard, nodes in holders.items()
        if len(nodes) < firsts.size
    ]
    for problem in filter(None, problems):
        raise DamagedCheckpoint(problem)


def on_all(firsts: Group, what: str, work: Callable[[], T]) -> list[T]:
    """Do something on every node and return the results; raise DamagedCheckpoint on all if it fails on one."""
    done, failed = None, None
    try:
        done = retry_files(work)
    except (HpctrainError, OSError, ValueError) as error:
        failed = said(error)
    gathered = firsts.allgather([done, failed], what, MOVE_TIMEOUT_S)
    for _, problem in gathered:
        if problem:
            raise DamagedCheckpoint(problem)
    return [result for result, _ in gathered]


def make_folder(folder: Path, head: bytes, shard_texts: Sequence[bytes]) -> None:
    """Create a snapshot's folder and write its manifest, before all shards are there.

    Raises DamagedCheckpoint, OSError, RunFailed.
    """
    data = manifest_file.with_shards(head, str(folder / HEAD_FILE), shard_texts)
    make_private(folder.parent.parent)
    folder.mkdir(0o700, parents=True, exist_ok=True)
    for name, content in ((HEAD_FILE, head), (MANIFEST_FILE, data)):
        write_atomically(folder / name, content, mode=0o600)  # without its head, a snapshot is lost


def require_room(folder: Path, needed: int) -> None:
    """Raise OSError if fewer bytes are free; in memory, also within the job's memory limit."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    left = cgroups.memory_left() if folder.is_relative_to(shared_memory.FOLDER) else None
    if needed > (free if left is None else min(left, free)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def send(path: Path, firsts: Group, root: int, lacks: bool) -> str | None:
    """Send a shard from one node to those that lack it. Collective over the nodes' first ranks.

    Returns an error message, or None.
    """
    what = f"send {path.name}"
    problem = None
    descriptor = -1
    size = 0
    partial = path.with_name(f"{MOVING}{path.name}")
    with ExitStack() as files:
        try:
            if firsts.rank == root:
                descriptor = open_regular(path)
                files.callback(os.close, descriptor)
                size = os.fstat(descriptor).st_size
            elif lacks:
                partial.unlink(missing_ok=True)
                descriptor = files.enter_context(created(partial, 0o600))
        except OSError as error:
            problem = said(error)
        size = firsts.broadcast(size, what, root, MOVE_TIMEOUT_S)
        buffer = np.empty(min(size, PIECE_BYTES), np.uint8)
        for begin in range(0, size, PIECE_BYTES):
            piece = buffer[: size - begin]
            try:
                if firsts.rank == root and not problem:
                    read_at(descriptor, piece.data, begin)
            except OSError as error:
                problem = said(error)
            firsts.broadcast_array(piece, what, root, MOVE_TIMEOUT_S)  # after an error, too: the others wait for it
            try:
                if lacks and not problem:
                    write_at(descriptor, piece.data, begin)
            except OSError as error:
                problem = said(error)
    is_whole = firsts.broadcast(not problem, what, root, MOVE_TIMEOUT_S)
    with suppress(OSError):
        if lacks:
            os.replace(partial, path) if is_whole and not problem else partial.unlink()
    return problem


def said(error: Exception) -> str:
    """Format an error with the node's name."""
    what = error.what if isinstance(error, HpctrainError) else str(error)
    return f"{socket.gethostname()}: {what}"
