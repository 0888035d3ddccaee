"""A script for Accelerate that does not use hpctrain: linear regression on CPUs."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
set_seed(0)
model = torch.nn.Linear(4, 1)
rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for step, batch in enumerate(loader):
    loss = (model(batch).sum(1) - 1).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    if accelerator.is_main_process:
        print(f"step {step} loss {loss.item()!r}", flush=True)
accelerator.wait_for_everyone()  # see foreign_ddp.py
accelerator.end_training()
