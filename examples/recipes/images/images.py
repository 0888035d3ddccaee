"""ResNet-50 or ViT-S/16 on JPEGs: random resized crops, label smoothing, in one global order on any number of ranks.

Data are a folder with one folder of photos per class, or WebDataset tars with a ``jpg`` and a ``cls`` per sample.
"""

from __future__ import annotations

import functools
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import hpctrain
from hpctrain import TorchTask

Sample = dict[str, Any]


class Photos(torch.utils.data.Dataset[Sample]):
    """Files of a folder with one folder per class: undecoded, or for validation decoded and cropped to a ``size``."""

    def __init__(self, folder: str, size: int | None = None) -> None:
        classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
        self.files = [(str(file), label) for label, of in enumerate(classes) for file in sorted(of.glob("*.jpg"))]
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        file, label = self.files[index]
        return record({"jpg": Path(file).read_bytes(), "cls": label}, self.size)


def record(files: Sample, size: int | None = None) -> Sample:
    """A sample from its encoded image; with a size, decoded and cropped in the middle."""
    encoded = np.frombuffer(files["jpg"], np.uint8)
    return {"image": encoded if size is None else centre_crop(encoded, size), "label": int(files["cls"])}


def opened(source: str, size: int | None = None) -> hpctrain.Dataset:
    """Open a folder of photos, or tars such as ``train-*.tar``."""
    if source.endswith(".tar"):
        return hpctrain.open_dataset(source, decode=functools.partial(record, size=size), ragged=size is None)
    return hpctrain.open_dataset(Photos(source, size), ragged=size is None)


def random_resized_crop(sample: Sample, rng: np.random.Generator, size: int, smallest: float = 0.08) -> Sample:
    """Decode a random part of 8% to 100% of the image, scale it, and flip half of them (Szegedy et al. 2015)."""
    image = Image.open(io.BytesIO(sample["image"]))
    width, height = image.size
    for _ in range(10):
        area, ratio = (
            width * height * rng.uniform(smallest, 1),
            math.exp(rng.uniform(-math.log(4 / 3), math.log(4 / 3))),
        )
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
            return {**sample, "image": pixels(image, (left, top, left + w, top + h), size, flip=rng.random() < 0.5)}
    return {**sample, "image": centre_crop(sample["image"], size)}


def centre_crop(encoded: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Scale the image so that its shorter side is 256/224 of ``size``, and take its middle."""
    image = Image.open(io.BytesIO(encoded))
    side = min(image.size) * 224 / 256
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return pixels(image, (left, top, left + side, top + side), size)


def pixels(
    image: Image.Image, box: tuple[float, float, float, float], size: int, flip: bool = False
) -> np.ndarray[Any, Any]:
    """uint8[3, size, size] of a part of the image. JPEG decodes directly to 1/2, 1/4 or 1/8 if that is large enough."""
    width, height = image.size
    scale = size / min(box[2] - box[0], box[3] - box[1])
    image.draft("RGB", (math.ceil(image.width * scale), math.ceil(image.height * scale)))
    across, down = image.width / width, image.height / height
    box = (box[0] * across, box[1] * down, min(box[2] * across, image.width), min(box[3] * down, image.height))
    scaled = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box))
    return np.ascontiguousarray((scaled[:, ::-1] if flip else scaled).transpose(2, 0, 1))


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Scale bytes on the device: a quarter of the bytes to copy."""
    image = batch["image"].float()
    mean, deviation = (image.new_tensor(of).view(3, 1, 1) for of in ((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)))
    logits: Tensor = model((image - mean) / deviation)
    return logits


class Bottleneck(nn.Module):
    """Block of ResNet-50 (He et al. 2016), with the stride in the 3 x 3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *convolution(inputs, width, 1), nn.ReLU(), *convolution(width, width, 3, stride), nn.ReLU(),
            *convolution(width, outputs, 1),
        )  # fmt: skip
        self.shortcut = nn.Identity() if inputs == outputs else nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its BatchNorm."""
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


def resnet50(classes: int, width: int = 64) -> nn.Sequential:
    """ResNet-50."""
    parts: list[nn.Module] = [*convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            parts.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class ViT(nn.Module):
    """Vision transformer with averaged tokens and fixed sine positions (Beyer et al. 2022)."""

    def __init__(self, classes: int, width: int = 384, blocks: int = 12, heads: int = 6, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patches(image)
        tokens = (tokens + positions(*tokens.shape[1:], tokens.device)).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.blocks(tokens).mean(1))
        return logits


def positions(width: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """float[width, rows, columns]: sines and cosines of row and column."""
    rate = 10_000 ** -(torch.arange(width // 4, device=device) / (width // 4))
    row = (rate[:, None] * torch.arange(rows, device=device))[:, :, None].expand(-1, -1, columns)
    column = (rate[:, None] * torch.arange(columns, device=device))[:, None].expand(-1, rows, -1)
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()])


def accuracy(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Fraction of images whose class has the largest logit."""
    return (logits.argmax(1) == batch["label"]).float().mean()


def task(
    train: str = "photos/train",
    validation: str = "photos/validation",
    model: str = "resnet50",
    classes: int = 1000,
    size: int = 224,
    width: int | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.05,
) -> TorchTask:
    """Build the task; ``width`` makes models smaller than published."""
    sizes = {} if width is None else {"width": width}
    built = resnet50(classes, **sizes) if model == "resnet50" else ViT(classes, **sizes)
    return TorchTask(
        model=built,
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=torch.optim.AdamW(built.parameters(), lr=lr, weight_decay=weight_decay),
        forward=forward,
        train=functools.partial(opened, train),
        transform=functools.partial(random_resized_crop, size=size),
        validation=functools.partial(opened, validation, size),
        metrics={"accuracy": accuracy},
    )
