"""A model of a file system: replays recorded system calls and produces states that a power loss could leave.

After a power loss only what was fsynced is certain: the bytes of a synced file, and the names in a synced folder.
Later changes to one folder's names survive in order up to some point, as in a journal, independently of other folders
and of file contents, which may survive wholly, partly, or not at all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CALL = re.compile(r"\d+ +(\w+)\((.*)\) += (-?\d+)")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
PATH_OF_DESCRIPTOR = re.compile(r"^(?:\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")


@dataclass
class File:
    """Bytes of a file as the program sees them, and those certainly on disk."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class Folder:
    """Names as the program sees them, those certainly on disk, and the changes in between, in order."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[str, str | None, File | Folder | None]] = field(default_factory=list)

    def change(self, remove: str, add: str | None = None, node: File | Folder | None = None) -> None:
        """Remove a name and add one; to create something, both are the new name."""
        apply(self.names, remove, add, node)
        self.pending.append((remove, add, node))

    def sync(self) -> None:
        """Apply fsync of the folder."""
        self.durable, self.pending = dict(self.names), []


def apply(names: dict[str, File | Folder], remove: str, add: str | None, node: File | Folder | None) -> None:
    """Apply one change to a folder's names."""
    names.pop(remove, None)
    if add is not None and node is not None:
        names[add] = node


@dataclass(frozen=True)
class Call:
    """A system call that succeeded."""

    name: str
    path: str
    other: str = ""
    data: bytes = b""
    offset: int = 0
    creates: bool = False


def parse(log: str) -> Iterator[Call]:
    """Parse the output of ``strace -f -y -xx`` into the calls that change or sync files."""
    unfinished: dict[str, str] = {}
    for line in log.splitlines():
        process = line.split(maxsplit=1)[0]
        if line.endswith("<unfinished ...>"):
            unfinished[process] = line.removesuffix("<unfinished ...>")
            continue
        if "resumed>" in line:
            line = unfinished.pop(process) + line.split("resumed>", 1)[1]
        match = CALL.match(line)
        if match and int(match[3]) >= 0:
            yield from understand(match[1], match[2], int(match[3]))


def understand(name: str, arguments: str, result: int) -> Iterator[Call]:
    """Parse one call."""
    strings = [unescape(text) for text in STRING.findall(arguments)]
    opened = PATH_OF_DESCRIPTOR.match(arguments)
    path = unescape(opened[1]).decode() if opened else ""
    if name == "openat" and "O_CREAT" in arguments:
        yield Call("create", strings[0].decode(), creates=True)
    elif name in ("mkdir", "unlink", "rmdir"):
        yield Call(name, strings[0].decode())
    elif name == "unlinkat":
        yield Call("unlink", f"{path}/{strings[0].decode()}")
    elif name in ("rename", "renameat", "renameat2"):
        yield Call("rename", strings[0].decode(), strings[1].decode())
    elif name == "pwrite64":
        yield Call("write", path, data=strings[0][:result], offset=int(arguments.rsplit(",", 1)[1]))
    elif name == "write":
        yield Call("append", path, data=strings[0][:result])
    elif name in ("fsync", "fdatasync"):
        yield Call("fsync", path)


def unescape(text: str) -> bytes:
    """Decode strace's hexadecimal escapes."""
    return bytes.fromhex(text.replace("\\x", ""))


class Disk:
    """Contents of a folder that exists from the start."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.top = Folder()

    def inside(self, path: str) -> bool:
        """Whether a path lies in the folder."""
        return path == self.root or path.startswith(self.root + "/")

    def find(self, path: str) -> File | Folder:
        """The file or folder at a path."""
        node: File | Folder = self.top
        for part in Path(path).relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.names[part]
        return node

    def do(self, call: Call) -> None:
        """Replay a call."""
        parent, name = (
            (self.find(str(Path(call.path).parent)), Path(call.path).name) if call.path != self.root else (None, "")
        )
        if call.name == "fsync":
            node = self.find(call.path)
            if isinstance(node, Folder):
                node.sync()
            else:
                node.durable = bytes(node.data)
            return
        if call.name in ("write", "append"):
            file = self.find(call.path)
            assert isinstance(file, File)
            offset = call.offset if call.name == "write" else len(file.data)
            file.data[offset : offset + len(call.data)] = call.data
            return
        assert isinstance(parent, Folder)
        if call.name == "create" and name not in parent.names:
            parent.change(name, name, File())
        elif call.name == "mkdir":
            parent.change(name, name, Folder())
        elif call.name in ("unlink", "rmdir"):
            parent.change(name)
        elif call.name == "rename":
            assert Path(call.other).parent == Path(call.path).parent, "only renames within a folder"
            parent.change(name, Path(call.other).name, parent.names[name])

    def leave(self, target: Path, luck: random.Random | float) -> None:
        """Write to ``target`` a state that a power loss at this point could leave.

        ``luck`` is the fraction of unsynced changes that survive: a number, or random for each folder and file.
        """
        leave_folder(self.top, target, luck)


def leave_folder(folder: Folder, target: Path, luck: random.Random | float) -> None:
    """Write a folder's surviving names and files."""
    names = dict(folder.durable)
    for change in folder.pending[: survivors(len(folder.pending), luck)]:
        apply(names, *change)
    for name, node in names.items():
        if isinstance(node, Folder):
            (target / name).mkdir()
            leave_folder(node, target / name, luck)
        else:
            whole = bytes(node.data)
            kept = node.durable if whole == node.durable else whole[: survivors(len(whole), luck)]
            (target / name).write_bytes(kept)


def survivors(count: int, luck: random.Random | float) -> int:
    """Number of changes, out of ``count``, that survive."""
    if isinstance(luck, random.Random):
        return luck.choice([0, count, luck.randint(0, count)])
    return int(count * luck)
