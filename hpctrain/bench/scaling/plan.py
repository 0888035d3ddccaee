"""The runs of ``hpctrain bench scaling``: a run file for each size, made from the user's. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.bench.scaling.fit import Shape
from hpctrain.bench.scaling.model import Mode
from hpctrain.config.sections import CheckpointConfig, Config, EarlyStopConfig, LaunchConfig, TrackConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm.directives import ranks_per_node
from hpctrain.system import python

INTERVALS = 12
"""Reported intervals of a run; the first ones warm up and the last holds the evaluation."""
WARM_UP = 2
LEAST_STEPS = INTERVALS
EXCHANGE_FILE = "exchange.json"
"""In the run folder of an exchange job."""


@dataclass(frozen=True)
class ScalingJob:
    """One run."""

    name: str
    """Of its run file and run folder."""
    shape: Shape
    config: Config
    global_batch: int | None
    """None: this run measures exchanges."""


def shapes(config: Config, ranks: Sequence[int], slurm: bool) -> list[Shape]:
    """Where these numbers of ranks run: on this machine, or on nodes that the run file fills.

    Raises:
        UserError: a number of ranks that does not fill its nodes.
    """
    if not slurm:
        return [Shape(1, count) for count in ranks]
    full = ranks_per_node(config.launch)
    for count in ranks:
        if count > full and count % full:
            raise UserError(
                f"{count} ranks do not fill nodes of {full} ranks (launch.ranks_per_node)",
                f"give multiples of {full}, or fewer than {full}, to --ranks",
            )
    return [Shape(-(-count // full), min(count, full)) for count in ranks]


def batches(config: Config, mode: Mode, ranks: Sequence[int]) -> list[int]:
    """Global batch for each number of ranks; at the smallest both modes have the run file's.

    Raises:
        UserError: the batch does not divide, or is smaller than the number of ranks.
    """
    least = min(ranks)
    whole = config.train.global_batch or (config.train.batch_per_rank or 1) * least
    if mode == "weak":
        if whole % least:
            raise UserError(
                f"train.global_batch is {whole}, which {least} ranks cannot share equally",
                "set train.batch_per_rank, or --mode strong",
            )
        return [whole // least * count for count in ranks]
    if whole < max(ranks):
        raise UserError(
            f"a global batch of {whole} leaves some of {max(ranks)} ranks without a sample",
            "set train.global_batch higher, give fewer --ranks, or --mode weak",
        )
    return [whole for _ in ranks]


def jobs(
    config: Config,
    modes: Sequence[Mode],
    shapes: Sequence[Shape],
    steps: int,
    rounds: int,
    threads: int | None,
    output: Path,
) -> list[ScalingJob]:
    """All runs, in the order in which they take turns. A size that two modes share is run once.

    Args:
        config: the user's run.
        modes: weak, strong or both.
        shapes: by size.
        steps: of a training run.
        rounds: runs of each kind.
        threads: of each rank at every size, else more ranks would mean fewer threads each; None: as the run file says.
        output: folder of all run folders.
    """
    ranks = [shape.ranks for shape in shapes]
    wanted = dict.fromkeys(
        pair for mode in modes for pair in zip(shapes, batches(config, mode, ranks), strict=True)
    )  # in order, each once
    made = []
    for number in range(1, rounds + 1):
        for shape, batch in wanted:
            name = f"ranks-{shape.ranks}-batch-{batch}-round-{number}"
            made.append(ScalingJob(name, shape, _training(config, name, shape, batch, steps, threads, output), batch))
        for shape in shapes:
            if shape.ranks > 1:
                name = f"exchange-{shape.ranks}-round-{number}"
                made.append(ScalingJob(name, shape, _exchanging(config, name, shape, output), None))
    return made


def further(measured: Shape, nodes_known: bool, cores: int | None, factor: int) -> list[Shape]:
    """Larger shapes, up to a multiple of the ranks measured: more nodes as full as those, if a link between nodes is
    known; else more ranks of this node, as long as it has cores."""
    found = []
    size = measured
    while size.ranks * 2 <= measured.ranks * factor:
        size = Shape(size.nodes * 2, size.ranks_per_node) if nodes_known else Shape(1, size.ranks * 2)
        if not nodes_known and (cores is None or size.ranks > cores):
            break
        found.append(size)
    return found


def _training(
    config: Config, name: str, shape: Shape, batch: int, steps: int, threads: int | None, output: Path
) -> Config:
    """The user's run, shortened, and without what is not part of a step."""
    train = dataclasses.replace(
        config.train,
        epochs=None,
        steps=steps,
        global_batch=batch,
        batch_per_rank=None,
        eval_every_epochs=None,
        eval_every_steps=steps,
        early_stop=EarlyStopConfig(),
        threads=config.train.threads or threads,
    )
    return dataclasses.replace(
        config,
        name=_safe(f"{config.name}-{name}"),
        run_dir=str(output / name),
        train=train,
        checkpoint=CheckpointConfig(enabled=False),
        track=TrackConfig(every_steps=max(1, steps // INTERVALS)),
        launch=_placed(config, shape),
    )


def _exchanging(config: Config, name: str, shape: Shape, output: Path) -> Config:
    """A plain command in place of training."""
    out = output / name / EXCHANGE_FILE
    own = "python3" if config.launch.slurm.wrap else None  # an image brings its own
    command = python.module("hpctrain.bench.scaling.exchange", "--out", str(out), interpreter=own)
    launch = dataclasses.replace(_placed(config, shape), command=tuple(command))
    return dataclasses.replace(
        config, name=_safe(f"{config.name}-{name}"), run_dir=str(output / name), task="", launch=launch
    )


def _placed(config: Config, shape: Shape) -> LaunchConfig:
    return dataclasses.replace(config.launch, nodes=shape.nodes, ranks_per_node=shape.ranks_per_node)


def _safe(name: str) -> str:
    """A run's name has 100 letters at most."""
    return name[-100:].lstrip("._-")
