"""The network in PyTorch: the task for ``hpctrain run``, and the program for torchrun.

The program is typical user code: DDP, and ``torch.save`` on rank 0 under a temporary name, loaded by all at the start.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.recovery.notes import CLASSES, FEATURES, HIDDEN, SAMPLES, SAVE_EVERY, Notes, note, samples
from hpctrain import TorchTask


def network() -> torch.nn.Module:
    """Makes the network, equal on all ranks."""
    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    return torch.nn.Sequential(
        linear(FEATURES, HIDDEN), relu(), linear(HIDDEN, HIDDEN), relu(), linear(HIDDEN, CLASSES)
    )


def task(log: str) -> TorchTask:
    """Makes the task for ``hpctrain run``."""
    net = network()
    return TorchTask(net, "cross_entropy", torch.optim.AdamW(net.parameters()), train=samples(), hooks=[Notes(log)])


def save(folder: Path, step: int, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves by all ranks; a checkpoint has its name once it is whole."""
    model, of_optimizer = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": of_optimizer}, checkpoint_id=folder / "partial")
    if torch.distributed.get_rank() == 0:
        (folder / "partial").rename(folder / f"step-{step:06d}")
    torch.distributed.barrier()


def loaded(folder: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint, if there is one; returns its step."""
    newest = max(folder.glob("step-*"), default=None)
    if newest is None:
        return 0
    model, of_optimizer = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(newest.name.removeprefix("step-"))


def digest(net: torch.nn.Module) -> str:
    """A hash of all weights, bit for bit."""
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters())).hexdigest()[:16]


def main() -> None:
    """The program for torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, required=True, help="file for the times of steps")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dcp", action="store_true", help="checkpoints of torch.distributed.checkpoint")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of a step on all ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(net.parameters())
    first = 0
    if args.dcp:
        first = loaded(args.checkpoint, net, optimizer)
    elif args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    x, y = (torch.from_numpy(values) for values in samples().values())
    share = args.batch // ranks
    for step in range(first, args.steps):
        mine = slice(begin := (step * args.batch + rank * share) % (SAMPLES - share), begin + share)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[mine]), y[mine]).backward()
        optimizer.step()
        due = (step + 1) % SAVE_EVERY == 0
        if args.dcp and due:
            save(args.checkpoint, step + 1, net, optimizer)
        if rank == 0:
            note(args.notes, step + 1)
            if due and not args.dcp:
                partial = args.checkpoint.with_suffix(".partial")
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, partial)
                partial.rename(args.checkpoint)
    if rank == 0:
        args.notes.with_suffix(".digest").write_text(digest(net))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
