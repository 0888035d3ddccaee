"""A whole run under a fixed schedule of kills: the same network, data and checkpoint interval under each contender.

    python -m benchmarks.under_kills [-n 2] [--steps 240] [--contenders hpctrain,torchrun,...]

A rank, the node (the command with all its processes), the time limit (SIGTERM, SIGKILL after 10 s), and a rank again;
each as soon as the run has come to a step. A command that ended too early is given again at once, as a scheduler
requeues a job. Each contender also runs without kills, for the time and the digits of the weights. ``torchrun`` and
Lightning get restarts enough for all kills.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.program import start
from benchmarks.recovery.__main__ import BATCH, noted, ours, ranks_below, started, torchrun
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import read

SCHEDULE = ((55, "rank"), (105, "node"), (155, "limit"), (205, "rank"))
"""Steps, in order, and what is killed as soon as the run has done them."""
LIMIT_S = 10.0
"""Seconds between SIGTERM and SIGKILL at the time limit."""
LONGEST_S = 200.0
"""A run that takes longer has failed."""
RESTARTS = len(SCHEDULE)


def with_dcp(ranks: int, folder: Path, kills: int, steps: int) -> list[str]:
    """Command of torchrun with checkpoints of torch.distributed.checkpoint."""
    return torchrun("torch_program", ranks, folder, kills, steps, "--dcp")


def torchft(ranks: int, folder: Path, kills: int, steps: int) -> list[str]:
    """Command of TorchFT's lighthouse, and one torchrun per replica group, each of one rank.

    TorchFT needs the store that torchrun shares with its rank, and makes a new one for each set of groups.
    """
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{door.getsockname()[1]}"
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    lighthouse = [program, "--min_replicas", "1", "--join_timeout_ms", "10000", "--bind", address]
    groups = [
        torchrun("torchft_program", 1, folder, kills, steps, "--group", str(group), "--groups", str(ranks))[2:]
        for group in range(ranks)
    ]
    lines = [
        f"export TORCHFT_LIGHTHOUSE=http://{address}",
        f"{shlex.join(lighthouse)} & lighthouse=$!",
        *(f"{shlex.join(words)} & groups+=($!)" for words in groups),
        'wait "${groups[@]}"; kill $lighthouse',
    ]
    return ["bash", "-c", "\n".join(lines)]


CONTENDERS: dict[str, Callable[[int, Path, int, int], list[str]]] = {
    "hpctrain": functools.partial(ours, "torch"),
    "torchrun": functools.partial(torchrun, "torch_program"),
    "torchrun-dcp": with_dcp,
    "lightning": functools.partial(torchrun, "lightning_program"),
    "torchft": torchft,
}


@dataclass(frozen=True)
class Outcome:
    """What a whole run took."""

    seconds: float
    steps: int
    """Steps that rank 0 did, repeated ones included."""
    commands: int
    """How often the command was given."""
    digest: str
    """Of the weights at the end; empty if it did not come to its end."""


def whole(name: str, ranks: int, steps: int, schedule: Sequence[tuple[int, str]]) -> Outcome:
    """Runs a contender to its end."""
    left, commands, chance = list(schedule), 0, random.Random(0)
    with tempfile.TemporaryDirectory(prefix="under-kills-") as place:
        folder, begin = Path(place), time.monotonic()
        words, log = CONTENDERS[name](ranks, folder, RESTARTS, steps), folder / "log"
        while time.monotonic() < begin + LONGEST_S and commands <= 2 * RESTARTS and not digest(folder):
            commands += 1
            with started(words) as child:
                while child.poll() is None and time.monotonic() < begin + LONGEST_S:
                    if left and any(step.number >= left[0][0] for step in noted(log)[-3:]):
                        befall(left.pop(0)[1], child, chance)
                    time.sleep(0.01)
        return Outcome(time.monotonic() - begin, len(noted(log)), commands, digest(folder))


def befall(what: str, child: subprocess.Popen[bytes], chance: random.Random) -> None:
    """Kills a rank or the node, or ends the command as a time limit does."""
    below = psutil.Process(child.pid).children(recursive=True)
    if what == "rank":
        chance.choice(ranks_below(child.pid)).kill()
        return
    if what == "limit":
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LIMIT_S)
    child.kill()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def digest(folder: Path) -> str:
    """The hash of the weights at the end of a run; empty if it has not come to its end."""
    noted_by_program = folder / "log.digest"
    if noted_by_program.exists():
        return noted_by_program.read_text()
    run = RunDir(folder / "run")
    newest = max((int(path.stem) for path in run.ranks.glob("*.json")), default=0) if run.ranks.exists() else 0
    words = read(run, newest) if newest else None
    ends = {word.weights_hash for word in words.ranks if word.ending == "completed"} if words else set()
    return next(iter(ends), None) or ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=240, help="steps of a run (default: 240)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma-separated (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def measure(args: argparse.Namespace) -> int:
    """Runs each contender without kills, then with them, and prints a line each."""
    found = {}
    heads = ("", "without kills s", "with kills s", "lost steps", "repeated samples", "commands", "same digits")
    print(" | ".join(heads))
    for name in args.contenders.split(","):
        quiet, killed = (whole(name, args.ranks, args.steps, schedule) for schedule in ((), SCHEDULE))
        lost = killed.steps - args.steps
        same = "no end" if not killed.digest else "yes" if killed.digest == quiet.digest else "no"
        row = (f"{quiet.seconds:.1f}", f"{killed.seconds:.1f}", lost, lost * BATCH, killed.commands, same)
        print(" | ".join(map(str, (name, *row))), flush=True)
        found[name] = [vars(quiet), vars(killed)]
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(
        start(
            "under_kills",
            "seconds of a whole run through four kills, with hpctrain and with other launchers",
            add_arguments,
            measure,
        )
    )
