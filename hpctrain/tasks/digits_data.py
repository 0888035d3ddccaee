"""scikit-learn's handwritten digits (1797 grayscale 8 x 8 images; Alpaydin, Kaynak 1998), packed to HDF5 on demand."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from hpctrain.errors import file_errors, requires
from hpctrain.system.files import replacement

VALIDATION = 297
"""Number of validation samples, drawn with a fixed seed."""


def pack(folder: str | Path) -> tuple[Path, Path]:
    """The training and validation files in a folder, created if missing; several ranks may call this at once.

    Each holds ``image`` float32[n, 1, 8, 8] in 0 to 1 and ``label`` int64[n], with n = 1500 and 297.

    Raises:
        MissingExtra: scikit-learn, which carries the images, is not installed.
        UserError: the folder cannot be written.
    """
    folder = Path(folder)
    paths = folder / "train.h5", folder / "validation.h5"
    if all(path.exists() for path in paths):
        return paths
    with requires("scikit-learn", "examples"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    with file_errors(f"the digits cannot be written to {folder}", "set task_args.data to a folder that you may write"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, part in zip(paths, (slice(VALIDATION, None), slice(VALIDATION)), strict=True):
            _write(path, image=images[part], label=labels[part])
    return paths


def _write(path: Path, **arrays: np.ndarray) -> None:
    """Write atomically and keep an existing file, since another rank may have opened it."""
    with replacement(path, first_wins=True) as temporary, h5py.File(temporary, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
