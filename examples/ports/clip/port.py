"""Contrastive pre-training of two encoders, as in CLIP (Radford et al. 2021): digits and their tokenised names."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hpctrain import TorchTask

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def pairs(samples):
    """Images, and texts of 8 letters: the digit's name followed by random letters."""
    digits = load_digits()
    images = torch.from_numpy((digits.images[:samples, None] / 16).astype(np.float32))
    rng = np.random.default_rng(0)
    texts = rng.integers(97, 123, (samples, 8))
    for row, label in zip(texts, digits.target, strict=False):
        name = np.frombuffer(NAMES[label].encode(), np.uint8)
        row[: len(name)] = name
    return images, torch.from_numpy(texts - 97)


class CLIP(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, dim)
        )
        self.text = nn.Sequential(nn.Embedding(26, 8), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, dim))
        self.logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)


def clip_loss(image, text, logit_scale):
    logits = logit_scale.exp() * image @ text.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def step(ctx, batch):
    image, text = map(ctx.gather, ctx.model(batch["x"], batch["y"]))
    loss = clip_loss(image, text, ctx.model.logit_scale)
    ctx.backward(loss)
    ctx.update()


def task():
    model = CLIP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TorchTask(model=model, optimizer=optimizer, step=step, train=TensorDataset(*pairs(900)))
