"""A file that grows piece by piece, by several processes; if they are killed, others continue it.

It lies in a separate folder next to its final name, with a layout, which says of what it is made, and marks, a file
for each process, which name the pieces that are on the disk. At the end the file is renamed, and the folder removed.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from hpctrain.system.files import FILE_MODE, make_private, remove_folder, sync_folder, write_atomically

MARK_S = 5.0
"""Between two marks of a process; each waits for the disk."""


@dataclass
class GrowingFile:
    """What is left to be written of a file."""

    path: Path
    """Of the file; its folder holds nothing else but layout and marks."""
    layout: Mapping[str, Any]
    done: frozenset[int]
    """Pieces that are on the disk."""
    mine: list[int]
    """Pieces that this rank is to write."""
    marks: Path
    """Of this process."""
    finished: list[int] = field(default_factory=list)
    """Pieces without a mark."""
    marked: float = field(default_factory=time.monotonic)

    def finish(self, index: int) -> None:
        """To be called when a piece has been written."""
        self.finished.append(index)
        if time.monotonic() - self.marked >= MARK_S:
            self.mark()

    def mark(self) -> None:
        """Notes what is on the disk, once it is."""
        sync(self.path)
        with open(self.marks, "a", encoding="ascii") as file:
            file.writelines(f"{index}\n" for index in self.finished)
            file.flush()
            os.fsync(file.fileno())
        self.finished, self.marked = [], time.monotonic()


def sync(path: Path) -> None:
    """Returns when a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def growing(
    path: Path, identity: str, pieces: int, make: Callable[[Path], Mapping[str, Any]], ranks: Ranks
) -> Iterator[GrowingFile]:
    """The file of this name while it grows; the body writes the pieces that are this rank's. Collective.

    Args:
        path: its final name, where it is when the body has ended on all ranks.
        identity: of all that will be in it. What is there of a file of another identity is thrown away.
        pieces: their number.
        make: makes the file without its pieces, and returns its layout, which JSON can hold.
        ranks: that write it.

    Raises:
        UserError: another process writes it.
    """
    folder = path.with_name(f".{path.name}.packing")
    with contextlib.ExitStack() as stack:
        told: list[Any] = []
        if ranks.rank == 0:
            make_private(folder)
            stack.enter_context(alone(folder, path))
        try:
            if ranks.rank == 0:
                layout = begun(folder, hashlib.sha256(identity.encode()).hexdigest(), make)
                told = [layout, sorted(marked(folder))]
            layout, done = ranks.allgather(told, "make the file", PATIENCE_S)[0]
            rest = sorted(set(range(pieces)) - set(done))[ranks.rank :: ranks.size]
            file = GrowingFile(folder / "file", layout, frozenset(done), rest, folder / f"marks-{os.urandom(8).hex()}")
            yield file
            file.mark()
        except BaseException:
            if ranks.size == 1 and not marked(folder):  # it was short: nothing is to be left
                remove_folder(folder)
            raise
        ranks.allgather(None, "write the file", PATIENCE_S)
        if ranks.rank == 0:
            if marked(folder) != set(range(pieces)):
                raise UserError(f"parts of {path} were not written", "give a folder that all ranks share")
            file.path.replace(path)
            remove_folder(folder)
            sync_folder(path.parent)


def begun(folder: Path, identity: str, make: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The layout of the file in a folder, which is made if there is none of this identity."""
    about = folder / "layout"
    with contextlib.suppress(OSError, ValueError):
        found = safe_read.read_json(about)
        if found["identity"] == identity and (folder / "file").stat().st_size == found["bytes"]:
            layout: Mapping[str, Any] = found["layout"]
            return layout
    for path in (about, *folder.glob("marks-*"), folder / "file"):  # the layout first: without it, nothing counts
        path.unlink(missing_ok=True)
    os.close(os.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
    layout = make(folder / "file")
    sync(folder / "file")
    known = {"identity": identity, "bytes": (folder / "file").stat().st_size, "layout": dict(layout)}
    write_atomically(about, json.dumps(known).encode())
    return layout


def marked(folder: Path) -> set[int]:
    """The pieces that are on the disk; a line that was torn does not count."""
    texts = [path.read_text(encoding="ascii") for path in folder.glob("marks-*")]
    return {int(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")}


@contextlib.contextmanager
def alone(folder: Path, path: Path) -> Iterator[None]:
    """Raises UserError if another process writes the file."""
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process packs {path}", "wait until it has ended, or choose another name"
            ) from error
        except OSError:  # a file system without such locks
            pass
        yield


PATIENCE_S = 7 * 86400.0
"""Longest wait for the other ranks: one that dies ends the others through MPI."""


class Ranks(Protocol):
    """Such as a ``Group`` of hpctrain.comm."""

    rank: int
    size: int

    def allgather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """The values of all ranks, in rank order; ``what`` they do completes an error."""


class Alone:
    """A process by itself."""

    rank = 0
    size = 1

    def allgather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """See Ranks."""
        return [value]


ALONE = Alone()
