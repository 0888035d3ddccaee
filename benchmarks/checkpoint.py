"""Compares checkpoints with torch.save and PyTorch's DCP, and measures memory: ``python -m benchmarks.checkpoint``."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.program import start
from hpctrain.backends.torch.process_groups import ends_calmly
from hpctrain.bench import checkpoint
from hpctrain.bench.checkpoint import COUNTS, Arrays, Other, make_state
from hpctrain.checkpoint.policy import Retention
from hpctrain.checkpoint.saver import array_tensors
from hpctrain.checkpoint.store import CheckpointStore, open_saver
from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text


def others(arrays: Arrays) -> dict[str, Other]:
    """Other ways of saving these arrays, by name."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def torch_save(path: Path) -> None:
        with open(path, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_async(path: Path) -> float:
        begin = time.perf_counter()
        future: Any = dcp.async_save(dict(tensors), checkpoint_id=str(path))
        stall = time.perf_counter() - begin
        future.result()  # its writer syncs each file
        return stall

    if not dist.is_initialized():
        ends_calmly()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {"torch.save": torch_save, "DCP async": dcp_async}


def memory_growth(arrays: Arrays, folder: Path, saves: int) -> float:
    """Growth of peak resident memory over many saves beyond the one staging copy, in MB."""
    os.sync()
    before = resident_bytes()
    store = CheckpointStore(folder / "memory", keep=Retention(last=1))
    saver = open_saver(store)
    tensors = array_tensors(arrays, {})
    peak = 0
    for step in range(saves):
        saver.begin(tensors, step, {})
        saver.finish().path_or_raise()
        peak = max(peak, resident_bytes())
    saver.close()
    shutil.rmtree(store.path)
    return (peak - before - sum(array.nbytes for array in arrays.values())) / 1e6


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    checkpoint.add_arguments(parser)
    parser.add_argument("--saves", type=int, default=50, help="saves over which memory is watched (default 50)")


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-checkpoint-") as folder:
        # first, since the C library may keep memory freed by contenders
        growth = {count: memory_growth(make_state(count, args.mb), Path(folder), args.saves) for count in COUNTS}
    rows = checkpoint.measured(args, others)
    if args.json:
        foreign_text.show(json.dumps({"rows": rows, "beyond_one_copy_mb": growth}))
        return ExitCode.DONE
    checkpoint.print_table(rows)
    for count, megabytes in growth.items():
        foreign_text.show(f"memory over {args.saves} saves of {count} tensors, beyond one copy: {megabytes:.0f} MB")
    return ExitCode.DONE


if __name__ == "__main__":
    about = "the stall, write and read of a checkpoint, compared with torch.save and DCP, and its memory"
    sys.exit(start("checkpoint", about, add_arguments, run))
