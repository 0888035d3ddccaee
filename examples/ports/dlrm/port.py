"""Click prediction with a small DLRM (Naumov et al. 2019): embedding tables with sparse gradients, and AUC."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryAUROC

from hpctrain import Selected, TorchTask

USERS, ITEMS, TAGS = 500, 200, 80


class Clicks(Dataset):
    """Synthetic: a click depends on the user's taste in the sample's 1 to 6 tags."""

    def __init__(self, samples, seed):
        taste = np.random.default_rng(0).normal(size=(USERS, TAGS))
        rng = np.random.default_rng(seed)
        self.dense = rng.normal(size=(samples, 4)).astype(np.float32)
        self.user = rng.integers(0, USERS, samples)
        self.item = rng.integers(0, ITEMS, samples)
        self.tags = [rng.integers(0, TAGS, rng.integers(1, 7)) for _ in range(samples)]
        liked = [taste[user % 10, tags].sum() for user, tags in zip(self.user, self.tags, strict=True)]
        self.label = (np.array(liked) + self.dense.sum(1) + 0.1 * rng.normal(size=samples) > 0).astype(np.float32)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return {
            "dense": self.dense[i],
            "user": self.user[i],
            "item": self.item[i],
            "tags": self.tags[i],
            "label": self.label[i],
        }


def collate(samples):
    batch = {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0] if name != "tags"}
    lengths = [len(s["tags"]) for s in samples]
    batch["tags"] = torch.from_numpy(np.concatenate([s["tags"] for s in samples]))
    batch["offsets"] = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return batch


class DLRM(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.user = nn.Embedding(USERS, dim, sparse=True)
        self.item = nn.Embedding(ITEMS, dim, sparse=True)
        self.tags = nn.EmbeddingBag(TAGS, dim, mode="sum", sparse=True)
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, dim))
        self.top = nn.Sequential(nn.Linear(dim + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch):
        dense = self.bottom(batch["dense"])
        bags = self.tags(batch["tags"], batch["offsets"])
        vectors = torch.stack([dense, self.user(batch["user"]), self.item(batch["item"]), bags], dim=1)
        dots = vectors @ vectors.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([dense, dots[:, i, j]], dim=1)).squeeze(1)


def task():
    model = DLRM()
    criterion = nn.BCEWithLogitsLoss()
    tables = [*model.user.parameters(), *model.item.parameters(), *model.tags.parameters()]
    optimizers = [
        torch.optim.SparseAdam(tables, lr=0.03),
        torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=0.01),
    ]
    return TorchTask(
        model=model,
        loss=lambda logits, batch: criterion(logits, batch["label"]),
        optimizer=optimizers,
        train=Clicks(450, seed=1),
        validation=Clicks(301, seed=2),
        collate=collate,
        forward=lambda model, batch: model(batch),
        metrics={"auc": Selected(BinaryAUROC(), lambda logits, batch: (logits.sigmoid(), batch["label"].int()))},
    )
