"""Models and data of the rows, and the bare loop with which hpctrain must agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt import Block, Gpt
from hpctrain import TorchTask, columns, cross_entropy, rows, vocabulary

WORDS = 256
NAME = "benchmarks.gpu_proof.tasks"


class WithDropout(Gpt):
    """Adds dropout before the first block, so that a resumed run depends on the device's random state."""

    def layers(self) -> list[nn.Module]:
        words, *others = super().layers()
        return [words, nn.Dropout(0.1).train(self.training), *others]


def gpt(
    width: int = 32,
    blocks: int = 4,
    heads: int = 4,
    length: int = 16,
    samples: int = 64,
    dtype: str = "float32",
    lr: float = 1e-3,
    dropout: bool = False,
    wait_s: float = 0.0,
    fused: bool = False,
) -> TorchTask:
    """GPT with fixed weights and tokens; ``wait_s`` is the time to read a sample."""
    torch.manual_seed(0)
    layers = [Block(width, heads, heads, 4 * width, gated=False, norm=nn.LayerNorm) for _ in range(blocks)]
    model = (WithDropout if dropout else Gpt)(WORDS, width, layers, nn.LayerNorm, tied=False)
    model = model.to(getattr(torch, dtype))
    starts = np.random.default_rng(0).integers(0, WORDS, (samples, 1))
    tokens = (starts + 3 * np.arange(length + 1)) % WORDS  # something to learn
    return TorchTask(
        model=model,
        loss=token_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, fused=fused),
        train={"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()},
        transform=slow(wait_s) if wait_s else None,
        tensor={
            "words": vocabulary,
            "blocks.*.qkv": columns(heads=heads),
            "blocks.*.out": rows,
            "blocks.*.up": columns,
            "blocks.*.down": rows,
            "head": columns(classes=True),
        },
        layers=lambda whole: whole.layers(),
    )


SMALL_LLAMA = {"length": 32, "width": 32, "blocks": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "words": WORDS}
"""Arguments of ``llama`` for CPUs."""


def llama(
    length: int = 4096,
    width: int = 4096,
    blocks: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    hidden: int = 14336,
    words: int = 128_256,
    samples: int = 16,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> TorchTask:
    """Transformer with the shape of Llama 3 8B, in bf16, made on its device; fixed weights and tokens."""
    torch.manual_seed(0)
    with torch.device(device):
        layers = [Block(width, heads, kv_heads, hidden, gated=True, norm=nn.RMSNorm) for _ in range(blocks)]
        model = Gpt(words, width, layers, nn.RMSNorm, tied=False).to(torch.bfloat16)
    tokens = (np.arange(samples)[:, None] + 3 * np.arange(length + 1)) % WORDS  # something to learn
    return TorchTask(
        model=model,
        loss=token_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda"),
        train={"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()},
        layers=lambda whole: whole.layers(),
    )


def token_loss(logits: Any, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy, mean over the tokens."""
    return cross_entropy(logits, batch["targets"])


def slow(seconds: float) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    """Makes a transform that sleeps."""
    import time

    def transform(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        time.sleep(seconds)
        return sample

    return transform


class Bottleneck(nn.Module):
    """Bottleneck of ResNet-50 (He et al. 2016), with the stride in the 3 x 3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *convolution(inputs, width, 1), nn.ReLU(), *convolution(width, width, 3, stride), nn.ReLU(),
            *convolution(width, outputs, 1),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, h, w] -> [n, 4 width, h / stride, w / stride]."""
        return functional.relu(self.path(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its BatchNorm."""
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


class ResNet(nn.Sequential):
    """uint8[n, 3, h, w] -> float[n, 1000]."""

    def __init__(self, blocks: tuple[int, ...], width: int) -> None:
        parts: list[nn.Module] = [*convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        inputs = width
        for stage, count in enumerate(blocks):
            for place in range(count):
                parts.append(Bottleneck(inputs, width << stage, 2 if stage and not place else 1))
                inputs = 4 * (width << stage)
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))

    def forward(self, images: Tensor) -> Tensor:
        """Scales bytes to [-1, 1] and applies the layers."""
        x = images.to(torch.float32) / 127.5 - 1
        for part in self:
            x = part(x)
        return x


def resnet(blocks: str = "3,4,6,3", width: int = 64, size: int = 224, samples: int = 512) -> TorchTask:
    """ResNet with fixed weights and images."""
    torch.manual_seed(0)
    model = ResNet(tuple(map(int, blocks.split(","))), width)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (samples, 3, size, size), np.uint8)
    return TorchTask(
        model=model,
        loss=class_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        train={"inputs": images, "targets": random.integers(0, 1000, samples)},
    )


def class_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy, mean over the images."""
    return functional.cross_entropy(logits, batch["targets"])


def batches(task: TorchTask, batch: int, steps: int, device: Any) -> list[dict[str, Tensor]]:
    """Batches in the order of ``data.shuffle: none``, on the device."""
    of_epoch = len(task.train["inputs"]) // batch
    firsts = [step % of_epoch * batch for step in range(steps)]
    return [
        {name: torch.from_numpy(array[first : first + batch]).to(device) for name, array in task.train.items()}
        for first in firsts
    ]


def bare_loop(
    task: TorchTask,
    given: list[dict[str, Tensor]],
    precision: torch.dtype | None = None,
    call: Any = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Trains with a loop as in torch's documentation, on the model's device; returns the loss of each step.

    Args:
        task: the task, for its model and optimizer.
        given: the batches, one per step.
        precision: dtype of autocast; None for that of the parameters.
        call: called instead of the model, such as a compiled one.
        after_step: called with the number of completed steps.
    """
    losses, model = [], task.model if call is None else call
    device = given[0]["inputs"].device.type
    for step, batch in enumerate(given, start=1):
        task.optimizer.zero_grad()
        with torch.autocast(device, precision) if precision else contextlib.nullcontext():
            loss = functional_loss(task, model(batch["inputs"]), batch)
        loss.backward()
        task.optimizer.step()
        losses.append(loss.detach())
        after_step(step)
    return [float(loss) for loss in losses]


def functional_loss(task: TorchTask, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy by torch: bare loops use no function of hpctrain."""
    return functional.cross_entropy(outputs.flatten(0, -2), batch["targets"].flatten())
