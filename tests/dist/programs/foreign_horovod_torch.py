"""A script for horovodrun or mpirun that does not use hpctrain: a small PyTorch network with Horovod's optimizer."""

import sys

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(hvd.rank())  # broadcast_parameters makes them equal
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

points = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
sampler = torch.utils.data.distributed.DistributedSampler(points, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, points.sum(1)), 4, sampler=sampler)
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), targets)
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="mean of the losses")
    if hvd.rank() == 0:
        print(f"epoch {epoch} loss {mean.item()!r}", flush=True)
hvd.shutdown()
