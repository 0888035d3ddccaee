"""Recovery time after a rank is killed: ``hpctrain run`` compared with ``torchrun --max-restarts``.

    python -m benchmarks.recovery [-n 2] [--rounds 5] [--kills 1] [--contenders hpctrain,torchrun,hpctrain-keras]

All train the same network (``torch_program``, ``keras_program``), alternately. Measured are the first start, from the
command to the first step, and recoveries, from SIGKILL of a random rank to the first step not done before.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.program import start
from benchmarks.recovery.notes import SAVE_EVERY
from hpctrain.errors import RunFailed
from hpctrain.launch.forks.forking import STAND_IN

STEPS, BATCH = 10_000, 64
KILL_AT = 35
"""Steps before the rank is killed, which is between two checkpoints."""
PATIENCE_S = 60.0
"""Seconds for a start or a recovery; one that takes longer has failed."""


def ours(framework: str, ranks: int, folder: Path, kills: int, steps: int = STEPS) -> list[str]:
    """Command of ``hpctrain run``."""
    keys = {
        "name": "recovery", "run_dir": folder / "run", "task": f"benchmarks.recovery.{framework}_program:task",
        "task_args.log": folder / "log",
        "train.steps": steps, "train.global_batch": BATCH, "train.threads": 1, "reduce.kind": "mpi",
        "checkpoint.every_steps": SAVE_EVERY, "launch.max_failures": kills + 1,
    }  # fmt: skip
    (folder / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items() if "." not in key))
    options = [word for key, value in keys.items() if "." in key for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "hpctrain", "run", "-n", str(ranks), str(folder / "run.yaml"), *options]


def torchrun(name: str, ranks: int, folder: Path, kills: int, steps: int = STEPS, *more: str) -> list[str]:
    """Command of torchrun on one machine, for a program of this package.

    Ranks that start again in the store that torchrun shares with them find one another's old addresses, and Gloo then
    hangs or fails (PyTorch 2.13: 3 of 8 kills), so they get a separate store for each attempt.
    """
    program = ["-m", f"benchmarks.recovery.{name}", "--notes", str(folder / "log"), *more]
    options = ["--checkpoint", str(folder / "state.pt"), "--steps", str(steps), "--batch", str(BATCH)]
    launcher = [
        "env",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        str(kills + 1),
    ]
    return [*launcher, "--nproc-per-node", str(ranks), *program, *options]


CONTENDERS: dict[str, Callable[..., list[str]]] = {
    "hpctrain": functools.partial(ours, "torch"),
    "torchrun": functools.partial(torchrun, "torch_program"),
    "hpctrain-keras": functools.partial(ours, "keras"),
}


def ranks_below(pid: int) -> list[psutil.Process]:
    """The rank processes below a process."""
    words = {"train", *(f"benchmarks.recovery.{name}_program" for name in ("torch", "lightning", "torchft"))}
    below = [each for each in psutil.Process(pid).children(recursive=True) if words & set(each.cmdline())]
    below = [each for each in below if str(STAND_IN) not in each.cmdline()]
    parents = {each.ppid() for each in below}
    return sorted((each for each in below if each.pid not in parents), key=lambda each: each.pid)


@dataclass(frozen=True)
class Step:
    """A line of the notes."""

    at: float
    """Unix seconds."""
    attempt: int
    number: int


def noted(log: Path) -> list[Step]:
    """Reads all steps so far."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [Step(float(at), int(attempt), int(number)) for at, attempt, number in map(str.split, lines)]


def awaited(log: Path, child: subprocess.Popen[bytes], attempt: int = 0, number: int = 0) -> Step:
    """Waits for the first step with at least this number, in at least this attempt. Raises RunFailed on timeout."""
    end = time.time() + PATIENCE_S
    while time.time() < end and child.poll() is None:
        for step in noted(log):
            if step.attempt >= attempt and step.number >= number:
                return step
        time.sleep(0.01)
    raise RunFailed(f"no step within {PATIENCE_S:.0f} s, or the command ended", "see its output above")


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager that runs a command and ends it with all its ranks."""
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


def turn(name: str, ranks: int, kills: int, chance: random.Random) -> dict[str, list[float]]:
    """Measures seconds of one start and of each recovery; NaN if it failed."""
    seconds: dict[str, list[float]] = {"start": [], "recovery": []}
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        log, begin = Path(folder, "log"), time.time()
        with started(CONTENDERS[name](ranks, Path(folder), kills)) as child:
            what, moment = "start", begin
            try:
                step = awaited(log, child)
                for _ in range(kills):
                    seconds[what].append(step.at - moment)
                    awaited(log, child, step.attempt, step.number + KILL_AT)
                    victim = chance.choice(ranks_below(child.pid))
                    what, moment = "recovery", time.time()
                    victim.kill()
                    again = awaited(log, child, step.attempt + 1)
                    # The remaining ranks may still note a step in progress.
                    done = max(each.number for each in noted(log) if each.attempt == step.attempt)
                    step = awaited(log, child, again.attempt, done + 1)
                seconds[what].append(step.at - moment)
            except RunFailed:
                seconds[what].append(math.nan)
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument("--kills", type=int, default=1, help="kills in a turn, one after the other (default: 1)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma-separated (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def measure(args: argparse.Namespace) -> int:
    """Takes turns and prints medians."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in args.contenders.split(",")}
    chance = random.Random(0)
    for _ in range(args.rounds):
        for name, all_turns in seconds.items():
            for what, values in turn(name, args.ranks, args.kills, chance).items():
                all_turns.setdefault(what, []).extend(values)
            print(name, json.dumps(all_turns), file=sys.stderr)
    if args.json:
        print(json.dumps(seconds))
        return 0
    print(f"{'':14}  start s  recovery s (median, largest)  ratio (median, largest)  recovered")
    for name, all_turns in seconds.items():
        begun, whole = ([each for each in all_turns[what] if not math.isnan(each)] for what in ("start", "recovery"))
        first, again = (statistics.median(values or [math.nan]) for values in (begun, whole))
        most, recovered = max(whole, default=math.nan), f"{len(whole)} of {args.rounds * args.kills}"
        seen = f"{again:18.2f}, {most:7.2f}  {again / first:14.2f}, {most / first:7.2f}"
        print(f"{name:14}  {first:7.2f}  {seen}  {recovered}")
    return 0


if __name__ == "__main__":
    raise SystemExit(
        start(
            "recovery",
            "seconds from a killed rank to the next new step, with hpctrain and with torchrun",
            add_arguments,
            measure,
        )
    )
