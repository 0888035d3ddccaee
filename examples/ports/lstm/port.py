"""An LSTM language model that carries its state from batch to batch; the rate falls when validation is no better."""

import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hpctrain import BaseHook, LaneSampler, PerRank, TorchScheduler, TorchTask


class Carried:
    """The state after the last batch: a lane for each of this rank's samples."""

    def __init__(self):
        self.hidden = None

    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, saved):
        self.hidden = saved["hidden"]

    def merge(self, states):
        parts = [state["hidden"] for state in states if state["hidden"] is not None]
        return {"hidden": tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True)) or None}

    def split(self, whole, rank, ranks):
        hidden = whole["hidden"]
        return {"hidden": hidden and tuple(each.tensor_split(ranks, dim=1)[rank].contiguous() for each in hidden)}


class NewEpoch(BaseHook):
    """The text begins again."""

    def __init__(self, carried):
        self.carried = carried

    def after_step(self, training, result):
        if training.state.batch == 0:
            self.carried.hidden = None


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
    carried = Carried()

    def forward(model, batch):
        logits, hidden = model(batch["tokens"], carried.hidden if model.training else None)
        carried.hidden = hidden if model.training else carried.hidden
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
        hooks=[NewEpoch(carried)],
    )
