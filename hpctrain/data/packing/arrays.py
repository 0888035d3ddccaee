"""NumPy files as sources: .npy files are mapped into memory, .npz archives are read whole. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hpctrain.data.dataset import ArrayDataset, choose, from_arrays
from hpctrain.data.packing.pack_source import PackSource, from_dataset
from hpctrain.errors import UserError, foreign_errors
from hpctrain.system.array_types import Array


def from_npz(path: Path, names: tuple[str, ...] | None = None) -> PackSource:
    """A source of the named arrays of a .npz archive, by default all; in memory only while its blocks are read."""

    def opened() -> ArrayDataset:
        with reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            chosen = choose(archive.files, names, str(path))
            return from_arrays({name: archive[name] for name in chosen}, str(path))

    return replace(from_dataset(opened()), blocks=lambda: from_dataset(opened()).blocks())


def from_npy(paths: Sequence[Path]) -> PackSource:
    """A source of one array per .npy file, named after the file."""
    if len({path.stem for path in paths}) < len(paths):
        raise UserError("two .npy files have the same name, and their arrays would too", "rename one of them")
    source = from_dataset(from_arrays({path.stem: mapped(path) for path in paths}, ", ".join(map(str, paths))))
    return replace(source, ordered=list(paths) != sorted(paths))  # the shell sorts what *.npy matches


def mapped(path: Path) -> Array:
    """The array of a .npy file, of which only what is used is read."""
    with reading(path):
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array


def reading(path: Path) -> AbstractContextManager[None]:
    """Turn errors of NumPy in the body into UserErrors, without its advice to unpickle."""
    what = f"{path} is truncated, damaged, or holds no NumPy arrays of numbers"
    fix = "save it again with numpy.save or numpy.savez"
    return foreign_errors(lambda error: UserError(f"{what}: {str(error).partition('. ')[0]}", fix))
