"""A siamese network that decides whether two images show the same digit (Hadsell et al. 2006)."""

import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    """Each image paired with another one, of the same digit in about half of the pairs."""

    def __init__(self, begin, end, seed):
        digits = load_digits()
        self.images = (digits.images[begin:end, None] / 16).astype(np.float32)
        labels = digits.target[begin:end]
        draw = random.Random(seed)
        self.pairs = []
        for first in range(len(labels)):
            same = draw.random() < 0.5
            others = np.flatnonzero((labels == labels[first]) == same)
            self.pairs.append((first, int(draw.choice(others)), float(same)))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        first, second, same = self.pairs[i]
        return self.images[first], self.images[second], np.float32(same)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 16),
        )  # fmt: skip

    def forward(self, first, second):
        return F.pairwise_distance(self.embed(first), self.embed(second))


def contrastive(distance, same, margin=1.0):
    return (same * distance**2 + (1 - same) * F.relu(margin - distance) ** 2).mean()


def evaluate(model, loader):
    model.eval()
    hits = 0
    with torch.no_grad():
        for first, second, same in loader:
            hits += ((model(first, second) < 0.5) == (same > 0.5)).sum().item()
    model.train()
    return hits / len(loader.dataset)


def main():
    torch.manual_seed(0)
    train = DataLoader(Pairs(0, 450, seed=1), batch_size=30)
    test = DataLoader(Pairs(450, 600, seed=2), batch_size=50)
    model = Siamese()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    for epoch in range(2):
        for first, second, same in train:
            loss = contrastive(model(first, second), same)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(f"step {step} loss {loss.item():.8f}")
        print(f"epoch {epoch + 1} accuracy {evaluate(model, test):.8f}")


if __name__ == "__main__":
    main()
