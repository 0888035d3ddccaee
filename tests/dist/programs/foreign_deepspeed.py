"""A script for DeepSpeed that does not use hpctrain: linear regression with ZeRO stage 1 on CPUs."""

import argparse

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
engine, _, loader, _ = deepspeed.initialize(
    args=parser.parse_args(),
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    training_data=list(rows),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
for step, batch in enumerate(loader):
    loss = (engine(batch).sum(1) - 1).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step} loss {loss.item()!r}", flush=True)
