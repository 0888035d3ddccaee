"""Exchanges small values between ranks through files in the run folder, for programs that must not use MPI."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.comm.group import TIMEOUT_S, Group, to_json
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, RunFailed, is_away
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import pieces
from hpctrain.system import files, safe_read
from hpctrain.system.retry import retry_files

MOST_OPENED = 64
"""Number of awaited files from which the folder is listed instead of trying to open each of them."""
LONGEST_PAUSE_S = 0.5
"""Longest pause between polls in seconds; long, as the folder may be on a shared file system."""


@dataclass(frozen=True)
class Place:
    """Where a rank is among all ranks and nodes."""

    rank: int
    size: int
    local_rank: int
    """Rank on its node."""
    local_size: int
    node: int
    """Index of its node; nodes are ordered by their lowest rank."""
    nodes: int
    host: str


def place_of(rank: int, hosts: Sequence[str]) -> Place:
    """Returns the place of a rank.

    Args:
        rank: the rank.
        hosts: host of each rank, by rank.
    """
    mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    nodes = list(dict.fromkeys(hosts))
    return Place(rank, len(hosts), mine.index(rank), len(mine), nodes.index(hosts[rank]), len(nodes), hosts[rank])


class MeetingStopped(HpctrainError):
    """The wait was interrupted before the other ranks arrived."""


class FolderGroup(Group):
    """A group whose ``allgather``, ``broadcast`` and ``barrier`` exchange JSON files; each call takes milliseconds.

    Rank 0 reads the values of all ranks and writes them to one file, which the others read. The files are stored next
    to the last words and removed with them when the attempt is over.

    Args:
        name: name of the group, unique within the attempt.
        run_dir: the run folder.
        attempt: number of the attempt.
        rank: this process's rank in the group.
        size: number of ranks in the group.
        interrupted: called while waiting; if it returns true, the wait raises MeetingStopped.
    """

    def __init__(
        self,
        name: str,
        run_dir: RunDir,
        attempt: int,
        rank: int,
        size: int,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name)
        self.rank, self.size = rank, size
        self.folder, self.root, self.interrupted = pieces(run_dir, attempt), run_dir.path, interrupted
        self.number = 0

    def allgather(self, value: Any, what: str = "gather values", timeout_s: float = TIMEOUT_S) -> list[Any]:
        """See Group."""
        self.number += 1
        end = time.monotonic() + timeout_s
        with files.writing(self.folder):
            retry_files(partial(files.make_folder, self.folder, self.root))
        if self.rank:
            self._leave(str(self.rank), value)
            everything = self._take({"all"}, what, end)["all"]
        else:
            others = self._take({str(rank) for rank in range(1, self.size)}, what, end)
            everything = [value, *(others[str(rank)] for rank in range(1, self.size))]
            self._leave("all", everything)
        return list(everything)

    def broadcast(self, value: Any, what: str = "broadcast values", root: int = 0, timeout_s: float = TIMEOUT_S) -> Any:
        """See Group."""
        return self.allgather(value if self.rank == root else None, what, timeout_s)[root]

    def barrier(self, what: str = "reach a barrier", timeout_s: float = TIMEOUT_S) -> None:
        """See Group."""
        self.allgather(None, what, timeout_s)

    def _path(self, who: str) -> Path:
        return self.folder / f"{self.name}-{self.number}-{who}"

    def _leave(self, who: str, value: Any) -> None:
        # The monitor's token is among the values.
        retry_files(partial(files.write_atomically, self._path(who), to_json(value), self.root, mode=0o600))

    def _take(self, missing: set[str], what: str, end: float) -> dict[str, Any]:
        """Waits for the values of these writers and returns them by writer.

        Raises:
            MeetingStopped: ``interrupted`` returned true.
            RunFailed: they did not arrive by ``end``.
        """
        found: dict[str, Any] = {}
        pause_s = 0.01
        while True:
            try:
                self._look(missing - found.keys(), found)
            except OSError as error:
                if not is_away(error):
                    raise
            if len(found) == len(missing):
                return found
            if self.interrupted():
                raise MeetingStopped(f"rank {self.rank} was stopped while it waited for the other ranks to {what}", "")
            if time.monotonic() > end:
                raise RunFailed(
                    f"rank {self.rank} of {self.size} waited for the other ranks to {what}",
                    "look for the rank that never arrived in the logs of the run folder",
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _look(self, awaited: set[str], found: dict[str, Any]) -> None:
        """Adds the values that are there by now. Raises OSError."""
        if len(awaited) > MOST_OPENED:  # only rank 0: listings by all ranks would cost the square of their number
            there = set(os.listdir(self.folder))
            awaited = {who for who in awaited if self._path(who).name in there}
        else:  # NFS remembers which files were missing until the folder is opened
            os.close(os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for who in sorted(awaited):
            with contextlib.suppress(FileNotFoundError):
                found[who] = safe_read.read_json(self._path(who))


def folder_world(name: str, run_dir: RunDir, attempt: int, place: Place) -> World:
    """Returns a World whose ranks communicate through their run folder.

    Args:
        name: prefix of the groups' names, unique within the attempt.
        run_dir: the run folder.
        attempt: number of the attempt.
        place: place of this rank.
    """
    everyone = FolderGroup(name, run_dir, attempt, place.rank, place.size)
    local = FolderGroup(f"{name}-node{place.node}", run_dir, attempt, place.local_rank, place.local_size)
    return World(everyone, everyone, local, place.node, place.nodes, place.host)
