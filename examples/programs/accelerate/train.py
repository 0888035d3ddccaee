"""A script with Accelerate that saves at a time limit: hpctrain submit --launch.nodes 2 -- python train.py"""

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

from hpctrain.callbacks.accelerate import SaveOnStop

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=200)
options.add_argument("--seconds-per-step", type=float, default=0.0)
args = options.parse_args()

# the order of each epoch depends on its number only, so that a resume in mid-epoch finds it again
data = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=data)
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
rows = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)  # type: ignore[arg-type]
model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), loader)
save = SaveOnStop(accelerator, "checkpoints", every_steps=100)
step = save.resume()
while step < args.steps:
    epoch, done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for x in accelerator.skip_first_batches(loader, done):
        loss = (model(x).squeeze(1) - x[:, 0] * x[:, 1]).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        time.sleep(args.seconds_per_step)
        save.after_step(step)
        if step == args.steps:
            break
accelerator.print(f"done at step {step} weights {sum(each.sum().item() for each in model.parameters())!r}")
accelerator.wait_for_everyone()
accelerator.end_training()
