"""A language model whose LSTM carries its state from batch to batch (truncated backpropagation through time)."""

import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hpctrain import BaseHook, LaneSampler, PerRank, TorchTask


class Carried:
    """State of the LSTM after the last batch, one lane for each of this rank's samples; None at a beginning."""

    def __init__(self):
        self.hidden = None  # two tensors, float32[layers, lanes, units]

    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, saved):
        self.hidden = saved["hidden"]

    def merge(self, states):  # all lanes, in the order of the ranks
        parts = [state["hidden"] for state in states if state["hidden"] is not None]
        return {"hidden": tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True)) or None}

    def split(self, whole, rank, ranks):  # as many lanes as the rank has samples in a batch
        hidden = whole["hidden"]
        return {"hidden": hidden and tuple(each.tensor_split(ranks, dim=1)[rank].contiguous() for each in hidden)}


class LanguageModel(nn.Module):
    """int64[n, t] tokens -> float32[n, t, vocabulary] logits of the next ones."""

    def __init__(self, vocabulary, units, carried):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, units)
        self.lstm = nn.LSTM(units, units, batch_first=True)
        self.head = nn.Linear(units, vocabulary)
        self.carried = carried

    def forward(self, tokens):
        hidden = self.carried.hidden if self.training else None
        outputs, hidden = self.lstm(self.embedding(tokens), hidden)
        if self.training:
            self.carried.hidden = tuple(each.detach() for each in hidden)
        return self.head(outputs)


class NewEpoch(BaseHook):
    """The text begins again with each epoch, and so does the state."""

    def __init__(self, carried):
        self.carried = carried

    def after_step(self, training, result):
        if training.state.batch == 0:
            self.carried.hidden = None


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
    carried = Carried()
    model = LanguageModel(len(vocabulary), units, carried)
    return TorchTask(
        model=model,
        loss=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        train={name: array[:-held_out] for name, array in data.items()},
        validation={name: array[-held_out:] for name, array in data.items()},
        sampler=LaneSampler(),
        state={"lanes": PerRank(carried, on_other_ranks="split")},
        hooks=[NewEpoch(carried)],
    )
