"""A Lightning script that saves at a time limit.

hpctrain submit --launch.nodes 2 --launch.launcher srun -- python train.py 1 2    # one device on each of two nodes
"""

import argparse
import os
import time

import lightning
import torch
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from hpctrain.callbacks.lightning import SaveOnStop

options = argparse.ArgumentParser()
options.add_argument("devices", type=int)
options.add_argument("nodes", type=int)
options.add_argument("--steps", type=int, default=200)
options.add_argument("--seconds-per-step", type=float, default=0.0)
args = options.parse_args()


class Regression(lightning.LightningModule):
    """Regression of rows to the product of their first two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
        time.sleep(args.seconds_per_step)
        return (self.layers(x).squeeze(1) - x[:, 0] * x[:, 1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
rows = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
order = DistributedSampler(rows, args.devices * args.nodes, int(os.environ.get("RANK", "0")), shuffle=False)  # type: ignore[arg-type]
loader = StatefulDataLoader(rows, batch_size=16, sampler=order)
save = SaveOnStop("checkpoints", every_steps=100)
trainer = lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    strategy="ddp",
    devices=args.devices,
    num_nodes=args.nodes,
    max_steps=args.steps,
    callbacks=[save],
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
    use_distributed_sampler=False,
)
model = Regression()
trainer.fit(model, loader, ckpt_path=save.newest())
if trainer.is_global_zero:
    print(f"done at step {trainer.global_step} weights {sum(each.sum().item() for each in model.parameters())!r}")
