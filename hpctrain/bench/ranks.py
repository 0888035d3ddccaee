"""Shared by benchmarks: programs on ranks of this machine, contenders that take turns, options."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hpctrain.comm.group import Group
from hpctrain.errors import RunFailed, UserError
from hpctrain.system import python

TIMEOUT_S = 1800


def on_ranks(module: str, options: Mapping[str, str], ranks: int) -> list[dict[str, Any]]:
    """Runs ``python -m module`` on ranks with one thread each; returns the rows that rank 0 wrote to ``--out``.

    Raises:
        RunFailed: the program failed (its last lines are in the message) or did not end within TIMEOUT_S.
    """
    from hpctrain.launch import mpi_library
    from hpctrain.system.cgroups import thread_environment

    library = mpi_library.probe() if ranks > 1 else None
    environment = {**python.environment(), **thread_environment(1, os.environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        out = Path(folder, "rows.json")
        words = python.module(module, *(word for pair in options.items() for word in pair), "--out", str(out))
        try:
            ended = mpi_library.on_ranks(words, ranks, library, environment, TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            fix = "measure less: fewer --rounds, --steps or contenders; hpctrain doctor tests MPI between ranks"
            raise RunFailed(f"{module} did not end within {TIMEOUT_S} s", fix) from error
        if ended.code or not out.exists():
            fix = "read the lines above; hpctrain doctor checks the installation"
            raise RunFailed(f"{module} ended with code {ended.code}:\n{(ended.output + ended.messages)[-4000:]}", fix)
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
        return rows


def write_rows(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the rows for ``on_ranks``."""
    Path(path).write_text(json.dumps({"rows": list(rows)}))


WARMUP_STEPS = 3


class Contender(Protocol):
    """One way of training; all contenders start with the same weights."""

    def step(self) -> None:
        """Makes one update."""

    def weights_hash(self) -> str:
        """Hash of the model's weights, to compare between ranks."""

    def close(self) -> None:
        """Stops everything that could slow the next contender."""


def take_turns(
    contenders: Sequence[str], make: Callable[[str], Contender], rounds: int, steps: int, group: Group
) -> tuple[dict[str, float], dict[str, bool]]:
    """Runs contenders in turn. Returns, by name, median step seconds on the slowest rank and whether weights agree."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    equal = dict.fromkeys(contenders, True)
    for _ in range(rounds):
        for name in contenders:
            contender = make(name)
            times[name] += timed(contender, steps, group)
            equal[name] &= len(set(group.allgather(contender.weights_hash(), "compare weights"))) == 1
            contender.close()
    mine = {name: statistics.median(values) for name, values in times.items()}
    everywhere = group.allgather(mine, "collect the times")
    return {name: max(rank[name] for rank in everywhere) for name in contenders}, equal


def timed(contender: Contender, steps: int, group: Group, warmup: int = WARMUP_STEPS) -> list[float]:
    """Seconds of each step, after a warm-up."""
    for _ in range(warmup):
        contender.step()
    group.barrier("begin together")
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        contender.step()
        times.append(time.perf_counter() - begin)
    return times


def existing_folder(text: str) -> Path:
    """Parses an option that names an existing folder. Raises UserError if it does not exist."""
    if not Path(text).is_dir():
        raise UserError(f"--folder {text} is not a folder", "name one that is there, on the disk to measure")
    return Path(text)
