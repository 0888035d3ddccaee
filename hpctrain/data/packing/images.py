"""Folders of images as sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hpctrain.data.dataset import Field, Samples
from hpctrain.data.packing.pack_source import PackSource, block_samples
from hpctrain.errors import UserError, requires
from hpctrain.system.array_types import Bytes

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def from_images(folder: Path, size: tuple[int, int] | None = None) -> PackSource:
    """A source with ``image`` uint8[height, width, channels] and, if there is a subfolder per class, ``label`` int64.

    Classes are numbered in the order of their names. If the first image is grayscale, all images are converted to one
    channel, else to three.

    Args:
        folder: a folder of images, or of one folder of images per class.
        size: (height, width) to scale to; by default all images must have the same size.

    Raises:
        UserError: there are no images, one is damaged, or sizes differ and ``size`` is not given.
    """
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = [(path, label) for label, name in enumerate(classes) for path in images_in(folder / name)]
    if not classes:
        files = [(path, 0) for path in images_in(folder)]
    if not files:
        fix = f"give a folder of {', '.join(sorted(SUFFIXES))}, or of folders of them"
        raise UserError(f"{folder} holds no images", fix)
    mode = "L" if mode_of(files[0][0]) in ("1", "L") else "RGB"
    first = decode(files[0][0], mode, size)
    fields = {"image": Field(first.shape, first.dtype)}
    if classes:
        fields["label"] = Field((), np.dtype(np.int64))

    def blocks() -> Iterator[Samples]:
        step = block_samples(fields)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for begin in range(0, len(files), step):
                some = files[begin : begin + step]
                images = threads.map(lambda file: decode(file[0], mode, size), some)
                samples = {"image": stacked(list(images), [path for path, _ in some], first.shape)}
                if classes:
                    samples["label"] = np.array([label for _, label in some], dtype=np.int64)
                yield samples

    return PackSource(fields, len(files), blocks, {"classes": classes} if classes else {})


def images_in(folder: Path) -> list[Path]:
    """All images in a folder and its subfolders, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def mode_of(path: Path) -> str:
    """The image's mode in Pillow, such as ``RGB``."""
    with requires("pillow", "data"):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(path) as image:
            return str(image.mode)
    except (OSError, UnidentifiedImageError) as error:
        raise damaged(path, error) from error


def decode(path: Path, mode: str, size: tuple[int, int] | None) -> Bytes:
    """The image's pixels, uint8[height, width, channels], converted to ``mode`` and scaled to ``size``."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            # Pillow would clip larger values.
            least, most = image.getextrema() if image.mode[0] in "IF" else (0, 255)
            converted = image.convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise damaged(path, error) from error
    if least < 0 or most > 255:
        fix = "scale such images to 8 bits first, or pack their values from .npy or .npz"
        raise UserError(f"{path} has values from {least:g} to {most:g}, and 8 bits hold 0 to 255", fix)
    if size is not None and converted.size != (size[1], size[0]):
        converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(converted)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def stacked(images: Sequence[Bytes], paths: Sequence[Path], shape: tuple[int, ...]) -> Bytes:
    """Stack the images along a new first axis; raises UserError if one differs in size."""
    for image, path in zip(images, paths, strict=True):
        if image.shape != shape:
            what = f"{path} is {image.shape[0]}x{image.shape[1]} pixels but the first image is {shape[0]}x{shape[1]}"
            raise UserError(what, f"scale all to one size, such as --size {shape[0]}x{shape[1]}")
    return np.stack(images)


def damaged(path: Path, error: Exception) -> UserError:
    """The error for an image that cannot be decoded."""
    return UserError(f"{path} is not an image, or is damaged: {error}", "replace it, or take it out of the folder")
