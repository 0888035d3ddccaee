"""A small GPT on a stream of tokens, packed from documents in WebDataset-style tar shards."""

import io
import pydoc_data.topics
import tarfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

CONTEXT = 32
END = 0


def write_shards(folder, shards=3, documents=40):
    """Write excerpts of Python's own documentation to tar shards, as 000000.txt and so on."""
    topics = iter(sorted(pydoc_data.topics.topics.values(), key=len))
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"shard-{shard:03d}.tar", "w") as tar:
            for number in range(documents):
                text = next(topics, "").encode()[:400]
                info = tarfile.TarInfo(f"{shard * documents + number:06d}.txt")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))


class Tokens(IterableDataset):
    """Endless: concatenated documents, cut into blocks of CONTEXT tokens and their next tokens."""

    def __init__(self, folder):
        self.shards = sorted(folder.glob("*.tar"))
        if not self.shards:
            raise FileNotFoundError(f"{folder} has no tar files")

    def __iter__(self):
        rest = []
        while True:
            for shard in self.shards:
                with tarfile.open(shard) as tar:
                    for member in tar:
                        rest += [*tar.extractfile(member).read(), END]
                        while len(rest) > CONTEXT:
                            block, rest = torch.tensor(rest[: CONTEXT + 1]), rest[CONTEXT:]
                            yield block[:-1], block[1:]


class GPT(nn.Module):
    def __init__(self, vocabulary=256, dim=32):
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.place = nn.Embedding(CONTEXT, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(CONTEXT))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def main():
    torch.manual_seed(0)
    folder = Path("shards")
    if not folder.exists():
        write_shards(folder)
    loader = DataLoader(Tokens(folder), batch_size=10)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=30)
    for step, (x, y) in enumerate(loader, 1):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print(f"step {step} loss {loss.item():.8f}")
        if step == 30:
            break


if __name__ == "__main__":
    main()
