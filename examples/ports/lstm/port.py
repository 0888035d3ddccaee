"""An LSTM language model that carries its state from batch to batch, with ReduceLROnPlateau on the validation loss."""

import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hpctrain import CarriedState, LaneSampler, PerRank, TorchScheduler, TorchTask


class LanguageModel(nn.Module):
    def __init__(self, vocabulary, units):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, units)
        self.lstm = nn.LSTM(units, units, batch_first=True)
        self.head = nn.Linear(units, vocabulary)

    def forward(self, tokens, hidden=None):
        outputs, hidden = self.lstm(self.embedding(tokens), hidden)
        return self.head(outputs), tuple(each.detach() for each in hidden)


def loss_of(logits, following):
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def task(characters=3000, context=16, units=16, lr=0.02):
    read = Path(pydoc_data.topics.__file__).read_text(encoding="utf-8")[:characters]
    vocabulary, codes = np.unique(list(read), return_inverse=True)
    samples = (len(codes) - 1) // context
    tokens = codes[: samples * context].reshape(samples, context)
    following = codes[1 : samples * context + 1].reshape(samples, context)
    held_out = samples // 10
    model = LanguageModel(len(vocabulary), units)
    carried = CarriedState()

    def forward(model, batch):
        logits, hidden = model(batch["tokens"], carried.get(model))
        carried.keep(model, hidden)
        return logits

    return TorchTask(
        model=model,
        loss=lambda logits, batch: loss_of(logits, batch["following"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        schedule=TorchScheduler(
            lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=0.2, threshold_mode="abs"
            ),
            every="evaluation",
        ),
        train={"tokens": tokens[:-held_out], "following": following[:-held_out]},
        validation={"tokens": tokens[-held_out:], "following": following[-held_out:]},
        forward=forward,
        sampler=LaneSampler(),
        state={"lanes": PerRank(carried, on_other_ranks="split")},
        hooks=[carried.new_each_epoch()],
    )
