"""A custom PyTorch loop on MPI ranks: python own_loop_torch.py, or mpirun -n 4 python -m mpi4py own_loop_torch.py."""

import torch
from torch.nn import functional

from hpctrain import ReduceConfig, connect, torch_broadcast, torch_reducer

BATCH, STEPS = 64, 200  # BATCH: samples per step over all ranks

torch.manual_seed(0)
world = connect()
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch_broadcast(world.data, list(model.state_dict().values()), "receive the weights")

points = torch.rand(4096, 2) * 4 - 2
values = (points[:, :1] * points[:, 1:]).sin()


def gradients(reducer, step=0):
    """Compute gradients of this rank's share of a batch and sum them over all ranks; return the batch's mean loss."""
    batch = torch.arange(step * BATCH, (step + 1) * BATCH)[world.rank :: world.size] % len(points)
    reducer.begin()
    loss = functional.mse_loss(model(points[batch]), values[batch], reduction="sum") / BATCH
    loss.backward()
    return reducer.exchange(loss.detach()).loss


reducer = torch_reducer(ReduceConfig(), world, model, rehearse=gradients)
for step in range(STEPS):
    loss = gradients(reducer, step)
    optimizer.step()
if world.rank == 0:
    print(f"{world.size} ranks, reducer {reducer.name}: loss {loss:.6f}")
reducer.close()
