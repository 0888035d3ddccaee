"""A DistributedDataParallel script that saves at a time limit: hpctrain submit --launch.nodes 2 -- python train.py

Two calls are hpctrain's. Without hpctrain (torchrun train.py) they do nothing.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hpctrain

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=200)
options.add_argument("--seconds-per-step", type=float, default=0.0)
args = options.parse_args()
path = Path("last.pt")

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
step = 0
if path.exists():
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    hpctrain.checkpoint_saved(step)


def save() -> None:
    """Write the checkpoint under another name first, so that a kill in the meantime leaves the one before."""
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        hpctrain.checkpoint_saved(step)
    dist.barrier()


while step < args.steps:
    seed = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(16, 8, generator=seed)
    loss = (model(x).squeeze(1) - x[:, 0] * x[:, 1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    time.sleep(args.seconds_per_step)
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step} loss {loss.item()!r}", flush=True)
    if hpctrain.stop_requested(agree=True):
        save()
        sys.exit(75)
save()
dist.destroy_process_group()
