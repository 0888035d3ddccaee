"""Writes synthetic photos to try the recipe: make_photos.py FOLDER IMAGES [--tars]

Each class has its own stripes. With --tars, the photos are in FOLDER/train-*.tar and validation-*.tar.
"""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 4


def photo(label: int, rng: np.random.Generator) -> bytes:
    """A JPEG of about 500 x 375 pixels with stripes in one of four directions."""
    height, width = rng.integers(300, 450), rng.integers(400, 600)
    row, column = np.indices((height, width))
    angle = np.pi * label / CLASSES
    stripes = np.sin((row * np.cos(angle) + column * np.sin(angle)) / rng.uniform(8, 16))
    colours = 128 + 60 * stripes[..., None] * rng.uniform(0.3, 1, 3) + rng.normal(0, 12, (height, width, 1))
    file = io.BytesIO()
    Image.fromarray(colours.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_folder(folder: Path, images: int, rng: np.random.Generator) -> None:
    for number in range(images):
        label = number % CLASSES
        path = folder / f"class-{label}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(label, rng))


def write_tars(folder: Path, images: int, rng: np.random.Generator, per_tar: int = 1000) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for first in range(0, images, per_tar):
        with tarfile.open(f"{folder}-{first // per_tar:04d}.tar", "w") as tar:
            for number in range(first, min(first + per_tar, images)):
                label = number % CLASSES
                for suffix, content in (("jpg", photo(label, rng)), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    write = write_tars if "--tars" in sys.argv else write_folder
    folder, images = Path(sys.argv[1]), int(sys.argv[2])
    write(folder / "train", images, np.random.default_rng(0))
    write(folder / "validation", max(images // 10, CLASSES), np.random.default_rng(1))
