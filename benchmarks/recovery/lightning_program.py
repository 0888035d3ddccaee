"""The network under Lightning, set up to resume as its documentation says: ModelCheckpoint, ``ckpt_path="last"``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from benchmarks.recovery.notes import SAVE_EVERY, note, samples
from benchmarks.recovery.torch_program import digest, network


class Classifier(lightning.LightningModule):
    """The network with its loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as in the other programs."""
        return torch.optim.AdamW(self.net.parameters())


class Notes(Callback):
    """Notes each step on rank 0."""

    def __init__(self, log: Path) -> None:
        self.file = log

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        """See ``Callback``."""
        if trainer.global_rank == 0:
            note(self.file, trainer.global_step)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, samples().values()))
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch // ranks, shuffle=True)
    saves = ModelCheckpoint(args.checkpoint.with_suffix(""), every_n_train_steps=SAVE_EVERY, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=ranks, max_steps=args.steps, callbacks=[saves, Notes(args.notes)],
        logger=False, enable_progress_bar=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.global_rank == 0:
        args.notes.with_suffix(".digest").write_text(digest(model.net))


if __name__ == "__main__":
    main()
