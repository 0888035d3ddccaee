"""A file that several processes write piece by piece; if they are killed, a later call resumes it.

It is in a temporary folder next to its final path, with a ``layout`` file that identifies its content and one
``marks`` file per process that lists the pieces on disk. At the end the file is renamed and the folder removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpctrain.errors import UserError
from hpctrain.system import safe_read
from hpctrain.system.files import FILE_MODE, make_private, remove_folder, sync, take_lock, write_atomically

MARK_S = 5.0
"""Minimum time between two marks of a process, since each mark syncs the file."""


@dataclass
class GrowingFile:
    """The state of a file that is being written."""

    path: Path
    """The incomplete file; its folder holds only this file, layout, marks and a lock."""
    layout: Mapping[str, Any]
    done: frozenset[int]
    """Pieces that were on disk at the start."""
    mine: list[int]
    """Pieces that this rank must write."""
    marks: Path
    """This process's marks file."""
    finished: list[int] = field(default_factory=list)
    """Pieces written but not yet marked."""
    marked: float = field(default_factory=time.monotonic)

    def finish(self, index: int) -> None:
        """Report that a piece was written."""
        self.finished.append(index)
        if time.monotonic() - self.marked >= MARK_S:
            self.mark()

    def mark(self) -> None:
        """Sync the file, then mark the finished pieces as on disk."""
        sync(self.path)
        with open(self.marks, "a", encoding="ascii") as file:
            file.writelines(f"{index}\n" for index in self.finished)
            file.flush()
            os.fsync(file.fileno())
        self.finished, self.marked = [], time.monotonic()


@contextlib.contextmanager
def growing(
    path: Path, identity: str, pieces: int, make: Callable[[Path], Mapping[str, Any]], ranks: Ranks
) -> Iterator[GrowingFile]:
    """Create or resume the file; the body writes this rank's pieces. Collective.

    Args:
        path: the final path, to which the file is renamed when the body has ended on all ranks.
        identity: identifies the whole content. An incomplete file with a different identity is discarded.
        pieces: number of pieces.
        make: creates the file without its pieces and returns its layout as JSON values.
        ranks: the ranks that write the file.

    Raises:
        UserError: another process is writing the file, or pieces are missing at the end.
    """
    folder = path.with_name(f".{path.name}.packing")
    with contextlib.ExitStack() as stack:
        found: list[Any] = []
        if ranks.rank == 0:
            make_private(folder)
            stack.enter_context(alone(folder, path))
        try:
            if ranks.rank == 0:
                layout = begun(folder, hashlib.sha256(identity.encode()).hexdigest(), make)
                found = [layout, sorted(marked(folder))]
            layout, done = ranks.allgather(found, "make the file", PATIENCE_S)[0]
            rest = sorted(set(range(pieces)) - set(done))[ranks.rank :: ranks.size]
            file = GrowingFile(folder / "file", layout, frozenset(done), rest, folder / f"marks-{os.urandom(8).hex()}")
            yield file
            file.mark()
        except BaseException:
            if ranks.size == 1 and not marked(folder):  # nothing worth resuming
                remove_folder(folder)
            raise
        ranks.allgather(None, "write the file", PATIENCE_S)
        if ranks.rank == 0:
            if marked(folder) != set(range(pieces)):
                raise UserError(f"parts of {path} were not written", "give a folder that all ranks share")
            file.path.replace(path)
            remove_folder(folder)
            sync(path.parent)


def begun(folder: Path, identity: str, make: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The layout of the file in the folder, which is created unless one with this identity exists."""
    about = folder / "layout"
    with contextlib.suppress(OSError, ValueError):
        found = safe_read.read_json(about)
        if found["identity"] == identity and (folder / "file").stat().st_size == found["bytes"]:
            layout: Mapping[str, Any] = found["layout"]
            return layout
    for path in (about, *folder.glob("marks-*"), folder / "file"):  # layout first: without it, the rest is ignored
        path.unlink(missing_ok=True)
    os.close(os.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
    layout = make(folder / "file")
    sync(folder / "file")
    known = {"identity": identity, "bytes": (folder / "file").stat().st_size, "layout": dict(layout)}
    write_atomically(about, json.dumps(known).encode())
    return layout


def marked(folder: Path) -> set[int]:
    """The pieces marked as on disk; an incomplete last line is ignored."""
    texts = [path.read_text(encoding="ascii") for path in folder.glob("marks-*")]
    return {int(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")}


@contextlib.contextmanager
def alone(folder: Path, path: Path) -> Iterator[None]:
    """Hold the folder's lock; raises UserError if another process holds it."""
    with open(folder / "lock", "w") as lock:
        if not take_lock(lock.fileno()):
            raise UserError(f"another process packs {path}", "wait until it has ended, or choose another name")
        yield


PATIENCE_S = 7 * 86400.0
"""Timeout for waiting on other ranks. It can be long, because if a rank dies, MPI ends the others."""


class Ranks(Protocol):
    """The processes that write a file together, such as a ``Group`` of hpctrain.comm."""

    rank: int
    size: int

    def allgather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """The values of all ranks, in rank order; ``what`` describes the operation in errors."""


class Alone:
    """Ranks of a single process."""

    rank = 0
    size = 1

    def allgather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """See Ranks."""
        return [value]


ALONE = Alone()
