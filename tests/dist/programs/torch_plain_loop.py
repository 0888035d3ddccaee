"""The training of torch_training.py, hand-written for one process without hpctrain; prints the losses."""

import json
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional

KIND = sys.argv[1]

random = np.random.default_rng(5)
points = random.normal(size=(183, 12)).astype(np.float32)
weights = random.integers(0, 4, 183).astype(np.float32)
classes = points[:, :3].argmax(1).astype(np.int64)

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(12, 31), nn.Tanh(), nn.Linear(31, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for step in range(50):
    begin = step % 7 * 30
    x, y, w = (torch.from_numpy(array[begin : begin + 30]) for array in (points, classes, weights))
    optimizer.zero_grad()
    if KIND == "weighted":
        each = functional.cross_entropy(model(x), y, reduction="none")
        loss = (each * w).sum() / w.sum()
    else:
        loss = functional.cross_entropy(model(x), y)
    loss.backward()
    if KIND == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
