"""An LSTM language model that carries its state from batch to batch, with ReduceLROnPlateau on the validation loss."""

import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from torch import nn

LANES = 8


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


def main(characters=3000, context=16, units=16, lr=0.02):
    torch.manual_seed(0)
    read = Path(pydoc_data.topics.__file__).read_text(encoding="utf-8")[:characters]
    vocabulary, codes = np.unique(list(read), return_inverse=True)
    samples = (len(codes) - 1) // context
    tokens = torch.from_numpy(codes[: samples * context].reshape(samples, context))
    following = torch.from_numpy(codes[1 : samples * context + 1].reshape(samples, context))
    held_out = samples // 10
    length = (samples - held_out) // LANES  # of a lane: each row of a batch continues where the row before ended
    model = LanguageModel(len(vocabulary), units)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2,
                                                         threshold_mode="abs")  # fmt: skip
    step = 0
    for epoch in range(2):
        hidden = None
        for i in range(length):
            rows = torch.arange(LANES) * length + i
            logits, hidden = model(tokens[rows], hidden)
            loss = loss_of(logits, following[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            print(f"step {step} loss {loss.item():.8f}")
        with torch.no_grad():
            logits, _ = model(tokens[-held_out:])
            validation = loss_of(logits, following[-held_out:]).item()
        plateau.step(validation)
        print(f"epoch {epoch + 1} loss {validation:.8f}")


if __name__ == "__main__":
    main()
