"""Opens HDF5 files and the files to which they lead, and checks each path before the library opens it.

The library itself would follow links anywhere: to a pipe, where it blocks forever, and to any file of the user's, which
it reads as data.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import h5py

from hpctrain.data.formats.hdf5_arrays import MappedArray
from hpctrain.errors import UserError, refusal

MOST_HOPS = 16
"""Limit on the length of a chain of links, the same as the library's."""
MOST_NAMES = 100_000
"""Limit on the arrays, groups and links of one file that are searched for arrays."""


class LinkedFiles:
    """A dataset's file and those to which it leads, each opened once. Leaving the context closes them unless ``keep``
    was called.

    Args:
        path: the file that the user named.
        outside: further folders to which it may lead.
    """

    def __init__(self, path: Path, outside: Sequence[str | Path] = ()) -> None:
        self.path = path
        self.outside = tuple(outside)
        self.opened: dict[Path, h5py.File] = {}
        self.maps: dict[Path, mmap.mmap] = {}
        self.kept = False

    def __enter__(self) -> LinkedFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self.kept or error:
            for file in self.opened.values():
                file.close()

    def keep(self) -> None:
        """Keep the files open after the context, because the library continues to read them."""
        self.kept = True

    def root(self) -> h5py.File:
        """The file that the user named; raises UserError if it cannot be opened."""
        look_at(self.path)
        return self.open(self.path)

    def open(self, path: Path) -> h5py.File:
        """Open a file that ``locate`` found; raises UserError if it is not HDF5 or is damaged."""
        real = path.resolve()
        if real not in self.opened:
            self.opened[real] = open_file(path)
        return self.opened[real]

    def find(self, group: h5py.Group, name: str) -> h5py.Dataset | h5py.Group | None:
        """The object of this name, following links of all kinds; None if it does not exist and no link is involved.

        Raises:
            UserError: a link is broken, circular, or leads outside the allowed folders.
        """
        here, names, hops = group, parts(name), 0
        while names:
            part = names.pop(0)
            link = link_at(here, part)
            if link is None and not hops:
                return None
            if link is None:
                raise UserError(
                    f"{self.path}: the link {name!r} leads to {here.name.rstrip('/')}/{part} of {here.file.filename}, "
                    "which does not exist",
                    "make the link again, or name only the arrays to use",
                )
            if isinstance(link, h5py.HardLink):
                here = here[part]
                continue
            hops += 1
            if hops > MOST_HOPS:
                what = f"{self.path}: the link {name!r} leads in a circle, or through more than {MOST_HOPS} links"
                raise UserError(what, "make the link again, or name only the arrays to use")
            if isinstance(link, h5py.ExternalLink):
                here = self.open(self.locate(here.file, link.filename, f"the link {name!r}"))["/"]
            elif link.path.startswith("/"):
                here = here.file["/"]
            names = parts(link.path) + names
        return here

    def locate(self, owner: h5py.File, name: str, what: str) -> Path:
        """Find a regular file that ``owner`` names, searched for next to ``owner``, then in the current folder.

        Raises:
            UserError: it does not exist, is a pipe or a device, or is in a folder that is not allowed; the message says
                that ``what`` leads to it.
        """
        home = Path(owner.filename).absolute().parent
        folders = (home, Path(owner.filename).resolve().parent, Path.cwd())
        candidates = [Path(name), home / Path(name).name] if Path(name).is_absolute() else [at / name for at in folders]
        found = next((path for path in candidates if path.exists()), None)
        if found is None:
            fix = "put the file there, or copy it"
            raise UserError(f"{self.path}: {what} leads to {candidates[0]}, which does not exist", fix)
        self._check_folder(found.resolve(), what)
        look_at(found, f"{self.path}: {what} leads to ")
        return found

    def _check_folder(self, real: Path, what: str) -> None:
        own = (self.path.absolute().parent.resolve(), self.path.resolve().parent)
        allowed = (*own, *(Path(folder).expanduser().resolve() for folder in self.outside))
        if not any(real.is_relative_to(folder) for folder in allowed):
            line = json.dumps([*map(str, self.outside), str(real.parent)], ensure_ascii=False)
            raise UserError(
                f"{self.path}: {what} leads to {real}, outside the data set's own folder",
                f"to allow it, add this line below data: in the run file: `allow_outside: {line}`; "
                f"hpctrain data pack and info take --allow-outside {shlex.quote(str(real.parent))}",
            )

    def contiguous(self, dataset: h5py.Dataset, begin: int) -> MappedArray | None:
        """The dataset's bytes from ``begin`` on in its file as an array; None if the file cannot be mapped."""
        owner = dataset.file
        if owner.driver != "sec2":
            return None
        path = Path(owner.filename)
        if not os.path.samestat(os.fstat(owner.id.get_vfd_handle()), os.stat(path)):
            raise UserError(f"{path} was replaced while it was opened", "do not change data during a run")
        mapped = MappedArray(path, self.map(path), begin, dataset.shape, dataset.dtype)
        mapped.check()
        return mapped

    def map(self, path: Path) -> mmap.mmap:
        """Map a file that ``locate`` found, or that is open, as a whole, read-only; each file is mapped once."""
        real = path.resolve()
        if real not in self.maps:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self.maps[real] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
        return self.maps[real]


def parts(name: str) -> list[str]:
    """The components of a path in an HDF5 file."""
    return [part for part in name.split("/") if part not in ("", ".")]


def link_at(group: object, name: str) -> h5py.HardLink | h5py.SoftLink | h5py.ExternalLink | None:
    """The link that a group holds under a name, not followed (``group.get(name, getlink=True)`` would follow it)."""
    encoded = name.encode(errors="surrogateescape")
    if not isinstance(group, h5py.Group) or not group.id.links.exists(encoded):
        return None
    kind = group.id.links.get_info(encoded).type
    if kind == h5py.h5l.TYPE_HARD:
        return h5py.HardLink()
    value = group.id.links.get_val(encoded)
    if kind == h5py.h5l.TYPE_SOFT:
        return h5py.SoftLink(value.decode(errors="surrogateescape"))
    if kind == h5py.h5l.TYPE_EXTERNAL:
        return h5py.ExternalLink(os.fsdecode(value[0]), value[1].decode(errors="surrogateescape"))
    raise ValueError(f"{name!r} is a link of an unknown kind")


def own_dataset(file: h5py.File, name: str) -> h5py.Dataset | None:
    """The dataset of this name in the file itself, or None; soft and external links are not followed."""
    here = file
    for part in parts(name):
        if not isinstance(link_at(here, part), h5py.HardLink):
            return None
        here = here[part]
    return here if isinstance(here, h5py.Dataset) else None


def names_in(file: h5py.File) -> Iterator[tuple[str, bool]]:
    """Names of all arrays and links, and whether each is a link, in creation order if the file tracks it."""
    seen = {hash(file["/"].id)}
    count = 0
    open_groups = [("", file, iter(file))]
    while open_groups:
        prefix, group, names = open_groups[-1]
        name = next(names, None)
        if name is None:
            open_groups.pop()
            continue
        count += 1
        if count > MOST_NAMES:
            raise UserError(f"{file.filename} holds more than {MOST_NAMES} names", "name the arrays to use")
        is_link = not isinstance(link_at(group, name), h5py.HardLink)
        item = None if is_link else group[name]
        if is_link or isinstance(item, h5py.Dataset):
            yield prefix + name, is_link
        elif isinstance(item, h5py.Group):
            if hash(item.id) in seen:
                what = f"{file.filename}: the group {prefix + name!r} contains itself, or is in the file twice"
                raise UserError(what, "name the arrays to use")
            seen.add(hash(item.id))
            open_groups.append((f"{prefix}{name}/", item, iter(item)))


def look_at(path: Path, leading: str = "") -> None:
    """Raise UserError unless this is a readable regular file. Never blocks, not even on a pipe.

    Args:
        path: the path to check; symbolic links are followed.
        leading: start of the error message.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            return
    except FileNotFoundError as error:
        raise UserError(f"{leading}{path} does not exist", "correct its path, as the compute nodes see it") from error
    except OSError as error:
        raise refusal(error, f"{leading}{path} cannot be opened: {error}", remedy(error)) from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{leading}{path} is a folder", f"name its files with a pattern: {path}/*.h5")
    fix = "copy what it gives into a file"
    raise UserError(f"{leading}{path} is not a plain file but a pipe, socket or device", fix)


def open_file(path: Path) -> h5py.File:
    """Open a file that passed ``look_at``; raises UserError if it is not HDF5 or cannot be opened."""
    try:
        if h5py.is_hdf5(path):
            return open_unlocked(path)
    except OSError as error:
        raise refusal(error, f"{path} cannot be opened: {error}", remedy(error)) from error
    fix = "hpctrain data pack makes one of .npz, .npy, CSV, Parquet and images"
    raise UserError(f"{path} is not an HDF5 file", fix)


def open_unlocked(path: Path) -> h5py.File:
    """Open for reading, also on a file system without locks, but not while another process writes the file."""
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if "unable to lock file" not in str(error) or error.errno == errno.EAGAIN:
            raise
        return h5py.File(path, "r", locking=False)


def remedy(error: OSError) -> str:
    """Advice for a file that cannot be opened."""
    if error.errno == errno.EMFILE:
        return "raise the number of files that a process may open (ulimit -n 65536), or pack the data into fewer"
    if error.errno == errno.EACCES:
        return "ask its owner for permission to read it"
    if error.errno == errno.EAGAIN:
        return "another process is writing it: wait until that has ended"
    return "it is truncated or damaged: copy it, or make it, again"


@contextlib.contextmanager
def asking(path: Path) -> Iterator[None]:
    """Turn the library's errors on an unreadable or damaged file into UserErrors."""
    try:
        yield
    except OSError as error:
        raise refusal(error, f"{path} cannot be read: {error}", remedy(error)) from error
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}", "it is damaged: copy it, or make it, again") from error
