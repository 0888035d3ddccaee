"""The network under TorchFT: each rank is a separate replica group, and the others continue without one that is lost.

A group that comes back gets the weights from the others. The checkpoint is for the loss of all groups.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.recovery.notes import SAMPLES, SAVE_EVERY, note, samples
from benchmarks.recovery.torch_program import digest, network


def main() -> None:
    """The program for torchrun, which starts a group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    net = network()
    plain = torch.optim.AdamW(net.parameters())

    def state() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": plain.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        net.load_state_dict(saved["model"])
        plain.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load, state_dict=state,
        replica_id=f"group_{args.group}", timeout=timedelta(seconds=30),
    )  # fmt: skip
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        load(saved)
        manager.load_state_dict(saved["manager"])
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, plain)
    x, y = (torch.from_numpy(values) for values in samples().values())
    share = args.batch // args.groups
    while (step := manager.current_step()) < args.steps:
        mine = slice(begin := (step * args.batch + args.group * share) % (SAMPLES - share), begin + share)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        done = manager.current_step()
        if done > step and manager.participating_rank() == 0:
            note(args.notes, done)
            if done % SAVE_EVERY == 0:
                partial = args.checkpoint.with_suffix(".partial")
                torch.save({**state(), "manager": manager.state_dict()}, partial)
                partial.rename(args.checkpoint)
    if args.group == 0:
        args.notes.with_suffix(".digest").write_text(digest(net))
    manager.shutdown()


if __name__ == "__main__":
    main()
