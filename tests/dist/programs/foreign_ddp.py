"""A script for torchrun that does not use hpctrain: linear regression with DistributedDataParallel or FSDP on CPUs."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
trained: torch.nn.Module = model
if "fsdp" in sys.argv:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (size,)))
else:
    trained = DistributedDataParallel(model)
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
random = torch.Generator().manual_seed(1)
for step in range(next((int(word) for word in sys.argv[1:] if word.isdigit()), 5)):
    batch = torch.randn(8, 4, generator=random)[rank::size]
    loss = (trained(batch).sum(1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item()!r}", flush=True)
weight = model.weight.full_tensor() if "fsdp" in sys.argv else model.weight
if rank == 0:
    print(f"weights {weight.sum().item():.6f}", flush=True)
if rank == size - 1 and "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == size - 1 and "die" in sys.argv:
    raise RuntimeError("the disk of the data is gone")
dist.barrier()  # PyTorch 2.13 aborts one run in twelve if a rank exits before the others, also under torchrun
dist.destroy_process_group()
