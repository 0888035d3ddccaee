"""Measures what many ranks cost the few processes that handle all of them: ``python -m benchmarks.simulate``.

Their functions run on synthetic input, with a tenth of the ranks and with all of them, which shows how the cost grows.
Memory is measured in a separate run, since tracing slows the code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.program import start
from hpctrain.bench.ranks import existing_folder
from hpctrain.checkpoint.checkpoint_folder import CheckpointFolder
from hpctrain.checkpoint.format.layout import TensorSpec, rows_of, shard_file
from hpctrain.checkpoint.format.shard_index import framed, piece_text, shard_text
from hpctrain.config.sections import MonitorConfig
from hpctrain.data.order import Order
from hpctrain.errors import ExitCode
from hpctrain.monitor.chief.chief import Chief
from hpctrain.monitor.chief.judge import Judge
from hpctrain.monitor.chief.stragglers import Heat
from hpctrain.monitor.framing import Message
from hpctrain.monitor.node.node import window_message
from hpctrain.monitor.window import CAUSES, Window
from hpctrain.report.plots import shrink
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord, WordReader, padded
from hpctrain.run.run_view import RunView
from hpctrain.system import foreign_text
from hpctrain.train.clock import Phase

RANKS_PER_NODE = 8
WINDOW_STEPS = 32
SLOW = 0.3
"""Fraction of the ranks that become slow, just below the fraction at which ranks are no longer named."""
HEALTHY_WINDOWS = 6
SAMPLES_PER_RANK = 1000
BATCH_PER_RANK = 8

Action = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """One part at one size."""

    part: str
    ranks: int
    seconds: float
    peak_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--ranks", type=int, default=10_000, help="ranks to simulate (default 10000)")
    parser.add_argument("--parts", help=f"comma-separated: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--folder", type=existing_folder, help="folder for the files, on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    names = args.parts.split(",") if args.parts else list(PARTS)
    sizes = [max(args.ranks // 10, 16), max(args.ranks, 160)]
    costs = [measure(name, ranks, args.folder) for name in names for ranks in sizes]
    if args.json:
        foreign_text.show(json.dumps([asdict(cost) for cost in costs]))
        return ExitCode.DONE
    foreign_text.show(f"{'':32}{sizes[0]:>9} ranks{sizes[1]:>9} ranks   grows as")
    for small, large in zip(costs[::2], costs[1::2], strict=True):
        power = growth(small, large)
        foreign_text.show(
            f"{PARTS[large.part][0]:32}{small.seconds:13.3f} s{large.seconds:13.3f} s   ranks^{power:.1f}"
            f"   {large.peak_bytes / 2**20:8.1f} MiB"
        )
    return ExitCode.DONE


def growth(small: Cost, large: Cost) -> float:
    """Exponent of the growth of a part's seconds with the number of ranks."""
    return math.log(max(large.seconds, 1e-6) / max(small.seconds, 1e-6)) / math.log(large.ranks / small.ranks)


def measure(name: str, ranks: int, folder: Path | None) -> Cost:
    """Runs a part twice, for time and for memory."""
    prepare = PARTS[name][1]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        action = prepare(ranks, Path(place))
        began = time.perf_counter()
        action()
        seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory(dir=folder) as place:
        tracemalloc.start()
        prepare(ranks, Path(place))()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return Cost(name, ranks, seconds, peak)


def hosts_of(ranks: int) -> list[str]:
    """Hosts of eight ranks each."""
    return [f"n{rank // RANKS_PER_NODE}" for rank in range(ranks)]


def window(index: int, ranks: int) -> Window:
    """Makes a window of healthy ranks or, from HEALTHY_WINDOWS on, with 30% slow ranks."""
    rng = np.random.default_rng(index)
    busy = rng.normal(0.02, 0.0002, (ranks, WINDOW_STEPS)).astype(np.float32)
    if index >= HEALTHY_WINDOWS:
        busy[slow_ranks(ranks)] *= 1.25
    typical = np.zeros((ranks, len(CAUSES)), dtype=np.float32)
    typical[:, Phase.FORWARD] = np.median(busy, axis=1)
    wait = busy.max(axis=0) - busy + np.float32(0.002)
    return Window(index, np.arange(ranks), busy, wait, np.ones_like(busy), typical, typical)


def slow_ranks(ranks: int) -> NDArray[np.int64]:
    """The slow ranks, the same in every window."""
    return np.random.default_rng(0).permutation(ranks)[: int(SLOW * ranks)]


def verdict(ranks: int, folder: Path) -> Action:
    """Judges the window that confirms 30% of the ranks as slow."""
    judge = Judge(hosts_of(ranks))
    for index in range(HEALTHY_WINDOWS + 1):
        judge.judge(window(index, ranks))
    last = window(HEALTHY_WINDOWS + 1, ranks)
    return lambda: judge.judge(last)


def chief(ranks: int, folder: Path) -> Action:
    """Handles one window and heartbeat of all nodes: decodes, judges and reports, and checks for hangs."""
    run_dir = RunDir(folder)
    run_dir.monitor.mkdir(parents=True)
    nodes = [rank // RANKS_PER_NODE for rank in range(ranks)]
    deciding = Chief(hosts_of(ranks), nodes, run_dir, 1, MonitorConfig(), lambda *_: None)
    for index in range(HEALTHY_WINDOWS + 1):
        for message in reports(window(index, ranks)):
            deciding.receive(message, 0.0)
    contents = [message.encode() for message in reports(window(HEALTHY_WINDOWS + 1, ranks))]

    def one_second() -> None:
        for content in contents:
            deciding.receive(Message.decode(content), 1.0)
        deciding.tick(1.1)

    return one_second


def reports(whole: Window) -> Iterator[Message]:
    """Messages with a window and a heartbeat of each node."""
    names = ("busy", "wait", "work", "typical", "mean")
    for first in range(0, len(whole.ranks), RANKS_PER_NODE):
        part = slice(first, first + RANKS_PER_NODE)
        arrays = {name: getattr(whole, name)[part] for name in names}
        yield window_message(Window(index=whole.index, ranks=whole.ranks[part], **arrays))
        beats = [[rank, 32 * whole.index, int(Phase.BACKWARD), 0.1, "S"] for rank in whole.ranks[part].tolist()]
        node = first // RANKS_PER_NODE
        yield Message("beat", {"node": node, "beats": beats, "dropped": 0, "first_step": 0})


def words(ranks: int, folder: Path) -> WordReader:
    """Writes last words of all ranks; returns a reader that has not read them."""
    long_ago = (time.time() - 3600,) * 2
    for rank in range(ranks):
        word = LastWord(rank, f"n{rank // RANKS_PER_NODE}", 1000 + rank, 5.0, 6.0)
        path = folder / f"{word.host}-{word.pid}.json"
        path.write_bytes(padded(word))
        os.utime(path, long_ago)
    return WordReader(folder)


def first_look(ranks: int, folder: Path) -> Action:
    """The first look, when the ranks have just started."""
    return words(ranks, folder).look


def next_look(ranks: int, folder: Path) -> Action:
    """A later look when nothing has changed."""
    reader = words(ranks, folder)
    while len(reader.look()) < ranks:
        pass
    return reader.look


def full_order(ranks: int, folder: Path) -> Action:
    """The sample order at the start of an epoch, on each rank."""
    order = Order(SAMPLES_PER_RANK * ranks, BATCH_PER_RANK * ranks)
    return lambda: order.batch_indices(0, 0)


def block_order(ranks: int, folder: Path) -> Action:
    """The sample order with block shuffle."""
    order = Order(SAMPLES_PER_RANK * ranks, BATCH_PER_RANK * ranks, shuffle="block")
    return lambda: order.batch_indices(0, 0)


def commit(ranks: int, folder: Path) -> Action:
    """Rank 0's commit after all shards are written: builds the manifest from their indexes."""
    checkpoints = CheckpointFolder(folder)
    partial = checkpoints.partial(1, "bench")
    checkpoints.prepare_folder(partial)
    spec = TensorSpec("model/weight", (ranks, 64), "float32")
    for rank in range(ranks):
        name = shard_file(rank, ranks)
        text = shard_text(name, 256, 0, 1 << 20, [piece_text(rows_of(spec, rank, 1), 0)], ["00000000"])
        (partial / name).write_bytes(bytes(256) + framed(text, 256))
    return lambda: checkpoints.commit(partial, 1, ranks, {})


def report(ranks: int, folder: Path) -> Action:
    """Writes the heat map as the monitor does, and reads it as the report does."""
    run_dir = RunDir(folder)
    run_dir.monitor.mkdir(parents=True)
    heat = Heat(ranks, WINDOW_STEPS)
    excess = np.random.default_rng(0).normal(0, 0.01, ranks)
    for index in range(64):
        heat.add(index, np.arange(ranks), excess)

    def write_and_draw() -> None:
        heat.save(run_dir.heat_map, run_dir.path)
        found = RunView(folder).heat_map()
        assert found is not None
        shrink(100 * found)

    return write_and_draw


PARTS: dict[str, tuple[str, Callable[[int, Path], Action]]] = {
    "verdict": ("verdict, 30% slow", verdict),
    "chief": ("first node's monitor, one window", chief),
    "first-look": ("last words, first look", first_look),
    "next-look": ("last words, each later look", next_look),
    "full-order": ("full shuffle, on each rank", full_order),
    "block-order": ("block shuffle, on each rank", block_order),
    "commit": ("commit of a checkpoint", commit),
    "report": ("heat map of the report", report),
}
"""Name in the table, and function that prepares the action, by name on the command line."""


if __name__ == "__main__":
    sys.exit(start("simulate", "what very many ranks cost the processes that handle all of them", add_arguments, run))
