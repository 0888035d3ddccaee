"""Opens HDF5 files, and finds the arrays in them.

The library itself would follow links to other files anywhere: to a pipe, where it blocks forever, and to any file of
the user's, which it reads as data.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType

import h5py

from hpctrain.data.formats.hdf5_arrays import MappedArray
from hpctrain.errors import UserError, refusal

MOST_HOPS = 16
"""Limit on the length of a chain of links, the same as the library's."""
MOST_NAMES = 100_000
"""Limit on the arrays, groups and links of one file that are searched for arrays."""
ELSEWHERE = (
    "open these files as one data set, by a list or a pattern such as part-*.h5, or copy the values with h5py; or name "
    "only the arrays to use"
)
"""The fix if values are in other files."""


class Hdf5File:
    """An HDF5 file, open within the context, or for good if ``keep`` was called; raises UserError if it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = False

    def __enter__(self) -> Hdf5File:
        look_at(self.path)
        self.root = open_file(self.path)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self.kept or error:
            self.root.close()

    def keep(self) -> None:
        """Keep the file open after the context, because the library continues to read it."""
        self.kept = True

    def find(self, name: str) -> h5py.Dataset | h5py.Group | None:
        """The object of this name, following soft links; None if it does not exist and no link is involved.

        Raises:
            UserError: a link is broken, circular, or leads to another file.
        """
        here = self.root["/"]
        names = parts(name)
        hops = 0
        while names:
            part = names.pop(0)
            link = link_at(here, part)
            if isinstance(link, h5py.HardLink):
                here = here[part]
                continue
            if link is None and not hops:
                return None
            if link is None:
                what = f"{self.path}: the link {name!r} leads to {here.name.rstrip('/')}/{part}, which does not exist"
                raise UserError(what, "make the link again, or name only the arrays to use")
            if isinstance(link, h5py.ExternalLink):
                raise UserError(f"{self.path}: {name!r} is a link to another file, {link.filename}", ELSEWHERE)
            hops += 1
            if hops > MOST_HOPS:
                what = f"{self.path}: the link {name!r} leads in a circle, or through more than {MOST_HOPS} links"
                raise UserError(what, "make the link again, or name only the arrays to use")
            if link.path.startswith("/"):
                here = self.root["/"]
            names = parts(link.path) + names
        return here

    def contiguous(self, dataset: h5py.Dataset, begin: int) -> MappedArray | None:
        """The dataset's bytes from ``begin`` on in the file as an array; None if the file cannot be mapped."""
        if self.root.driver != "sec2":
            return None
        if not os.path.samestat(os.fstat(self.root.id.get_vfd_handle()), os.stat(self.path)):
            raise UserError(f"{self.path} was replaced while it was opened", "do not change data during a run")
        mapped = MappedArray(self.path, self.mapping, begin, dataset.shape, dataset.dtype)
        mapped.check()
        return mapped

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The whole file, mapped read-only."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)


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


def names_in(file: h5py.File) -> Iterator[str]:
    """Names of all arrays and links, in creation order if the file tracks it."""
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
            yield prefix + name
        elif isinstance(item, h5py.Group):
            if hash(item.id) in seen:
                what = f"{file.filename}: the group {prefix + name!r} contains itself, or is in the file twice"
                raise UserError(what, "name the arrays to use")
            seen.add(hash(item.id))
            open_groups.append((f"{prefix}{name}/", item, iter(item)))


def look_at(path: Path) -> None:
    """Raise UserError unless this is a readable regular file. Never blocks, not even on a pipe."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            return
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist", "correct its path, as the compute nodes see it") from error
    except OSError as error:
        raise refusal(error, f"{path} cannot be opened: {error}", remedy(error)) from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder", f"name its files with a pattern: {path}/*.h5")
    fix = "copy what it gives into a file"
    raise UserError(f"{path} is not a plain file but a pipe, socket or device", fix)


def open_file(path: Path) -> h5py.File:
    """Open a file that passed ``look_at``; raises UserError if it is not HDF5 or cannot be opened."""
    try:
        return open_unlocked(path)
    except OSError as error:
        if error.errno is None and not h5py.is_hdf5(path):  # which is also False if the file cannot be read now
            fix = "hpctrain data pack makes one of .npz, .npy, CSV, Parquet and images"
            raise UserError(f"{path} is not an HDF5 file", fix) from error
        raise refusal(error, f"{path} cannot be opened: {error}", remedy(error)) from error


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
