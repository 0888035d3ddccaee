"""How long a run stands still when a rank is killed: ``hpctrain run`` compared with ``torchrun --max-restarts``.

    python -m benchmarks.recovery [-n 2] [--rounds 5] [--contenders hpctrain,torchrun,hpctrain-keras]

All train one model (``torch_program``, ``keras_program``), in turns. Measured are the first start, from the command
to the first step, and the recovery, from SIGKILL of the last rank to the next step taken.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.program import start
from benchmarks.recovery.notes import SAVE_EVERY
from hpctrain.errors import RunFailed

STEPS, BATCH = 10_000, 64
KILL_AT = 35
"""Steps taken before the rank is killed: between two checkpoints."""
PATIENCE_S = 60.0
"""Seconds for a start or a recovery; one that takes longer has failed."""


def ours(framework: str, ranks: int, folder: Path) -> list[str]:
    """The command of ``hpctrain run``."""
    keys = {
        "name": "recovery", "run_dir": folder / "run", "task": f"benchmarks.recovery.{framework}_program:task",
        "task_args.log": folder / "log",
        "train.steps": STEPS, "train.global_batch": BATCH, "train.threads": 1, "reduce.kind": "mpi",
        "checkpoint.every_steps": SAVE_EVERY, "launch.max_failures": 3,
    }  # fmt: skip
    (folder / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items() if "." not in key))
    options = [word for key, value in keys.items() if "." in key for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "hpctrain", "run", "-n", str(ranks), str(folder / "run.yaml"), *options]


def torchrun(ranks: int, folder: Path) -> list[str]:
    """The command of torchrun on one machine."""
    program = ["-m", "benchmarks.recovery.torch_program", "--notes", str(folder / "log")]
    options = ["--checkpoint", str(folder / "state.pt"), "--steps", str(STEPS), "--batch", str(BATCH)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    return [*launcher, "--nproc-per-node", str(ranks), *program, *options]


CONTENDERS: dict[str, Callable[[int, Path], list[str]]] = {
    "hpctrain": functools.partial(ours, "torch"),
    "torchrun": torchrun,
    "hpctrain-keras": functools.partial(ours, "keras"),
}


def ranks_below(pid: int) -> list[psutil.Process]:
    """Processes that train, youngest last."""
    words = {"train", "benchmarks.recovery.torch_program"}
    below = [each for each in psutil.Process(pid).children(recursive=True) if words & set(each.cmdline())]
    parents = {each.ppid() for each in below}
    return sorted((each for each in below if each.pid not in parents), key=lambda each: each.pid)


def step_after(log: Path, count: int, moment: float, child: subprocess.Popen[bytes]) -> float:
    """Time of the ``count``-th step behind a moment (Unix seconds). Raises RunFailed if there will be none."""
    end = time.time() + PATIENCE_S
    while time.time() < end and child.poll() is None:
        times = [float(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []
        later = [each for each in times if each > moment]
        if len(later) >= count:
            return later[count - 1]
        time.sleep(0.01)
    raise RunFailed(f"no step within {PATIENCE_S:.0f} s, or the command ended", "see its output above")


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is ended with all its ranks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        below = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
        child.kill()
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        child.wait()


def turn(name: str, ranks: int) -> dict[str, float]:
    """Seconds of one start and one recovery."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        log, begin = Path(folder, "log"), time.time()
        with started(CONTENDERS[name](ranks, Path(folder))) as child:
            first = step_after(log, 1, begin, child)
            step_after(log, KILL_AT, begin, child)
            victim = ranks_below(child.pid)[-1]
            killed = time.time()
            victim.kill()
            # A step that had begun may still be noted by the rank that is left.
            return {"start": first - begin, "recovery": step_after(log, 1, killed + 0.5, child) - killed}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma-separated (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def measure(args: argparse.Namespace) -> int:
    """Takes turns and prints medians."""
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in args.contenders.split(",")}
    for _ in range(args.rounds):
        for name, turns in seconds.items():
            try:
                turns.append(turn(name, args.ranks))
            except RunFailed:
                turns.append({"start": float("nan"), "recovery": float("nan")})
    if args.json:
        print(json.dumps(seconds))
        return 0
    print(f"{'':14}  start s  recovery s  recovered")
    for name, turns in seconds.items():
        whole = [each for each in turns if not math.isnan(each["recovery"])]
        begun, again = (statistics.median(each[key] for each in whole or turns) for key in ("start", "recovery"))
        print(f"{name:14}  {begun:7.2f}  {again:10.2f}  {len(whole)} of {len(turns)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(start("recovery", __doc__ or "", add_arguments, measure))
