"""``hpctrain plan``: memory of a rank under each plan that fits the ranks, before a job is submitted."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpctrain.backends.torch.strategies.memory_estimate import (
    Footprint,
    MemoryEstimate,
    ParallelLayout,
    cheapest,
    footprints,
)
from hpctrain.comm.world import undivided
from hpctrain.config.sections import Config, LaunchConfig
from hpctrain.errors import ExitCode, UserError
from hpctrain.rank import plan_check
from hpctrain.rank.trial import UNKNOWN_NODE, estimate, node_size, program_bytes, require_stages
from hpctrain.run.resolve_run import configured
from hpctrain.system import foreign_text, quantities
from hpctrain.train.schedule import global_batch

PIPELINED = "pipeline"
"""Key of pipeline plans among the reasons why plans are impossible."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
WIDEST = 1000
"""Width of the table in characters, even on a narrow terminal, so that no cell is truncated."""
PARTS = ("program", "parameters", "gradients", "optimizer", "averages", "activations", "staging", "total")


def show(found: Sequence[Footprint], reasons: Mapping[str, str], limit: int | None) -> None:
    """Prints a table of plans, and why others are impossible."""
    from rich.console import Console
    from rich.table import Table

    unit = "G" if max(one.total for one in found) >= 10 * UNITS["G"] else "M"
    apart = ("host", "device") if any(one.offloaded for one in found) else ()
    parts = [name for name in (*PARTS, *apart) if any(getattr(one, name) for one in found)]
    staged = ["pipeline"] if any(one.plan.pipeline > 1 for one in found) else []
    table = Table("tensor", *staged, "data", "shard", box=None, title=f"{unit}iB of a rank", title_justify="left")
    waits = ["bubble"] if staged else []
    for name in [*parts, *(["fits"] if limit else []), *waits]:
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        plan = one.plan
        values = [f"{getattr(one, name) / UNITS[unit]:.1f}" for name in parts]
        fits = [] if limit is None else ["yes" if one.limited <= limit else "no"]
        stages, bubbles = ([str(plan.pipeline)], [f"{one.bubble:.0%}"]) if staged else ([], [])
        table.add_row(str(plan.tensor), *stages, str(plan.data), plan.shard, *values, *fits, *bubbles)
    Console(width=WIDEST).print(table)
    foreign_text.show(f"\na checkpoint has {quantities.size(found[0].checkpoint)}")
    for plan_or_size, reason in reasons.items():
        key = "tensor" if plan_or_size.isdecimal() else "shard"
        said = plan_or_size if plan_or_size == PIPELINED else f"{key} {plan_or_size}"
        why = re.sub(r"^parallel\.\w+ is \w+, and ", "", reason)
        foreign_text.show(f"{said} is not possible: {why}")


LARGEST_PIPELINE = 8
"""Maximum number of stages, unless the run file asks for more."""
MOST_RANKS = 100_000
"""Maximum of ``-n``: an estimate is made for each rank of a sharded optimizer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments; see ``cli``."""
    parser.add_argument(
        "run_file", help="run file or run folder; its task is loaded in this process and trained for one step"
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, help="ranks of the run")
    parser.add_argument(
        "--memory",
        type=num_bytes,
        metavar="SIZE",
        help="memory of a rank, such as 80G; exit code 64 if it does not suffice (default: from launch.slurm.memory)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="build the plan of the run file for some of the ranks, without training, and find out what would fail",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(overrides=[])


def num_bytes(text: str) -> int:
    """Parses a size such as 512M or 1.5G, in powers of 1024 as in Slurm."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write one such as 80G")
    size = round(float(found[1]) * UNITS[found[2].upper()])
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} leaves a rank nothing: write a size such as 80G")
    return size


def run(args: argparse.Namespace) -> int:
    """Prints the plans; raises UserError if that of the run file is impossible or does not fit the memory."""
    if not 1 <= args.ranks <= MOST_RANKS:
        raise UserError(f"-n is {args.ranks}", f"give the number of ranks, from 1 to {MOST_RANKS}")
    config, _ = configured(args.run_file, args.overrides)
    memory = args.memory or memory_of(config.launch)
    program = program_bytes()
    if args.check:
        return check(config, args.ranks, program, memory, args.json)
    sizes = group_sizes(config, args.ranks)
    estimates, reasons = estimate_all(config, sizes, args.ranks)
    if not estimates:
        raise UserError(next(iter(reasons.values())), "start another number of ranks, or choose another global batch")
    shared = {tensor * pipeline for tensor, model in estimates.items() for pipeline in (1, *model.stages)}
    samples = {size: largest_micro_batch(config, args.ranks // size) for size in shared}
    found = footprints(
        estimates, args.ranks, samples, program, config.train.accumulate, config.parallel.pipeline_chunks
    )
    given = config.parallel
    size = given.tensor * given.pipeline
    shard = given.shard if args.ranks > size else "none"
    given_plan = ParallelLayout(given.tensor, args.ranks // size, shard, given.pipeline, given.pipeline_chunks)
    own = next((one for one in found if one.plan == given_plan), None)
    if args.json:
        result = {"plans": [one.to_json() for one in found], "not_possible": reasons, "memory": memory}
        foreign_text.show(json.dumps(result, indent=1))
    else:
        show(found, reasons, memory)
    if own is None:
        kinds = [str(given.tensor), *([PIPELINED] if given.pipeline > 1 else []), shard]
        why = [reasons[kind] for kind in kinds if kind in reasons] if args.ranks % size == 0 else []
        what = why[0] if why else undivided(args.ranks, given.tensor, given.pipeline)
        raise UserError(what, "choose one of the plans above")
    if memory is None or own.limited <= memory:
        return ExitCode.DONE
    fitting = cheapest(found, memory)
    missing = quantities.size(own.limited - memory)
    what = f"a rank of {args.run_file} needs {quantities.size(own.limited)}, {missing} more than it has"
    if fitting is None:
        fix = "give it more memory, a smaller batch, or train.recompute for its largest layers: no plan above fits"
        raise UserError(what, fix)
    raise UserError(what, f"write {fitting.plan.keys}: {quantities.size(fitting.limited)}")


def check(config: Config, ranks: int, program: int, memory: int | None, as_json: bool) -> int:
    """Prints what some ranks would have; raises UserError if the run file's plan would fail on them."""
    found = plan_check.check(config, ranks)
    if as_json:
        foreign_text.show(json.dumps([one.to_json() for one in found], indent=1))
    else:
        for one in found:
            parts = (f"{name} {quantities.size(size)}" for name, size in one.memory.parts.items() if size)
            foreign_text.show(
                f"rank {one.rank}{one.place} on node {one.node}: {one.samples} samples, {', '.join(parts)}"
            )
        foreign_text.show(
            f"these ranks can be built, on nodes of {node_size(config, ranks)} ranks; the sizes are without activations"
        )
    largest = max(found, key=lambda one: one.total)
    if memory is not None and program + largest.total > memory:
        what = f"rank {largest.rank} needs {quantities.size(program + largest.total)} without activations"
        raise UserError(
            f"{what}, and has {quantities.size(memory)}", "divide the model over more ranks, or choose another plan"
        )
    return ExitCode.DONE


def memory_of(launch: LaunchConfig) -> int | None:
    """Memory per rank that a job requests, in bytes; None if it requests none, or if ranks train in GPU memory."""
    given = re.fullmatch(r"(\d+)([KMGT]?)(/cpu)?", launch.slurm.memory or "")
    if given is None or launch.slurm.gpus_per_node or not int(given[1]):
        return None
    size = int(given[1]) * UNITS[given[2] or "M"]
    return size * (launch.slurm.cpus_per_rank or 1) if given[3] else size // (launch.ranks_per_node or 1)


def group_sizes(config: Config, ranks: int) -> list[int]:
    """Returns sizes of tensor groups that divide the ranks and fit within a node."""
    node = config.launch.ranks_per_node or config.launch.slurm.gpus_per_node
    limit = UNKNOWN_NODE if node is None else node
    whole = math.gcd(ranks, node or ranks)
    sizes = {size for size in range(1, min(limit, whole) + 1) if whole % size == 0}
    return sorted(sizes | {config.parallel.tensor} if whole % config.parallel.tensor == 0 else sizes)


def estimate_all(config: Config, sizes: Sequence[int], ranks: int) -> tuple[dict[int, MemoryEstimate], dict[str, str]]:
    """Returns estimates by size of tensor group, and why other sizes and sharded optimizers are impossible.

    Raises UserError if there is no estimate for the whole model.
    """
    estimates: dict[int, MemoryEstimate] = {}
    reasons: dict[str, str] = {}
    of_shards: dict[str, str] = {}
    unstaged = None
    try:
        if ranks > 1:
            require_stages(config, max(config.parallel.pipeline, 2))
    except UserError as error:
        unstaged = error.what
    for size in sizes:
        try:
            largest_micro_batch(config, ranks // size, size)
        except UserError as error:  # too many groups
            reasons[str(size)] = error.what
            continue
        try:
            pipelines = pipeline_sizes(config, ranks // size) if unstaged is None else []
            estimates[size], found = estimate(config, size, ranks, pipelines)
            of_shards = found | of_shards
        except UserError as error:
            if size == 1:
                raise
            reasons[str(size)] = error.what
    return estimates, reasons | of_shards | ({PIPELINED: unstaged} if unstaged else {})


def pipeline_sizes(config: Config, ranks: int) -> list[int]:
    """Returns the numbers of stages that divide this number of ranks and leave each model enough samples."""
    sizes = {size for size in (*range(2, LARGEST_PIPELINE + 1), config.parallel.pipeline) if size > 1}
    able = []
    for size in sorted(size for size in sizes if ranks % size == 0):
        with suppress(UserError):
            largest_micro_batch(config, ranks // size)
            able.append(size)
    return able


def largest_micro_batch(config: Config, data: int, each: int = 1) -> int:
    """Returns the largest number of samples in one pass, if ``data`` groups of ``each`` ranks share a batch."""
    share = -(-global_batch(config.train, data, each) // data)
    return -(-share // config.train.accumulate)
