"""A language model whose LSTM carries its state from batch to batch (truncated backpropagation through time)."""

import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hpctrain import CarriedState, LaneSampler, PerRank, TorchTask


class LanguageModel(nn.Module):
    """int64[n, t] tokens -> float32[n, t, vocabulary] logits of the next token."""

    def __init__(self, vocabulary, units, carried):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, units)
        self.lstm = nn.LSTM(units, units, batch_first=True)
        self.head = nn.Linear(units, vocabulary)
        self.carried = carried

    def forward(self, tokens):
        outputs, hidden = self.lstm(self.embedding(tokens), self.carried.get(self))
        self.carried.keep(self, hidden)
        return self.head(outputs)


def loss(logits, batch):
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["next"].flatten())


def task(text=None, characters=60000, context=32, units=64, lr=0.005):
    read = Path(text or pydoc_data.topics.__file__).read_text(encoding="utf-8")[:characters]
    vocabulary, codes = np.unique(list(read), return_inverse=True)
    samples = (len(codes) - 1) // context
    data = {
        "token": codes[: samples * context].reshape(samples, context),
        "next": codes[1 : samples * context + 1].reshape(samples, context),
    }
    held_out = samples // 10
    carried = CarriedState()
    model = LanguageModel(len(vocabulary), units, carried)
    return TorchTask(
        model=model,
        loss=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        train={name: array[:-held_out] for name, array in data.items()},
        validation={name: array[-held_out:] for name, array in data.items()},
        sampler=LaneSampler(),
        state={"lanes": PerRank(carried, on_other_ranks="split")},
        hooks=[carried.new_each_epoch()],
    )
