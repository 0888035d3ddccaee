"""A script for Lightning that does not use hpctrain: linear regression. foreign_lightning.py DEVICES NODES"""

import sys

import lightning
import torch


class Regression(lightning.LightningModule):
    """Regression of rows to a sum of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = (self.layer(batch).sum(1) - 1).square().mean()
        if self.global_rank == 0:
            print(f"step {number} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


devices, nodes = map(int, sys.argv[1:])
lightning.seed_everything(0)
rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(accelerator="cpu", strategy="ddp", devices=devices, num_nodes=nodes, max_epochs=1, **quiet)
trainer.fit(Regression(), loader)
