"""A BERT-like classifier of token sequences, padded to the longest in a batch; warm-up, clipping and F1."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassF1Score

from hpctrain import Selected, TorchTask

VOCABULARY, CLASSES, PAD, CLS = 60, 3, 0, 1


class Sentences(Dataset):
    """Synthetic: 4 to 20 random tokens; the class depends on their mean."""

    def __init__(self, samples, seed):
        rng = np.random.default_rng(seed)
        self.tokens = [np.array([CLS, *rng.integers(2, VOCABULARY, rng.integers(4, 21))]) for _ in range(samples)]
        self.labels = [int(np.digitize(tokens[1:].mean(), [27, 34])) for tokens in self.tokens]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


def collate(samples):
    longest = max(len(s["input_ids"]) for s in samples)
    input_ids = np.full((len(samples), longest), PAD)
    for row, sample in zip(input_ids, samples, strict=True):
        row[: len(sample["input_ids"])] = sample["input_ids"]
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(input_ids != PAD),
        "labels": torch.tensor([int(s["labels"]) for s in samples]),
    }


class Bert(nn.Module):
    def __init__(self, dim=32, layers=2):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim, padding_idx=PAD)
        self.place = nn.Embedding(32, dim)
        self.norm = nn.LayerNorm(dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler = nn.Linear(dim, dim)
        self.classifier = nn.Linear(dim, CLASSES)

    def forward(self, input_ids, attention_mask):
        x = self.norm(self.token(input_ids) + self.place(torch.arange(input_ids.shape[1])))
        x = self.encoder(x, src_key_padding_mask=~attention_mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def task():
    model = Bert()
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]
    warmup, total = 5, 30
    return TorchTask(
        model=model,
        loss=lambda logits, batch: F.cross_entropy(logits, batch["labels"]),
        optimizer=torch.optim.AdamW(groups, lr=5e-3),
        schedule=lambda step: min((step + 1) / warmup, (total - step) / (total - warmup)),
        train=Sentences(300, seed=1),
        validation=Sentences(101, seed=2),
        collate=collate,
        forward=lambda model, batch: model(batch["input_ids"], batch["attention_mask"]),
        metrics={"f1": Selected(MulticlassF1Score(CLASSES), lambda logits, batch: (logits, batch["labels"]))},
    )
