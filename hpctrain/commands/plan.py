"""``hpctrain plan``: what a rank needs under each plan that fits the ranks, before a job is submitted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.commands.plan_output import (
    PIPELINED,
    SHARDS,
    UNITS,
    Row,
    draw,
    keep,
    plans_of,
    show,
    size_of,
    told_fastest,
)
from hpctrain.errors import ExitCode, UserError
from hpctrain.run.folder import RunDir
from hpctrain.system import foreign_text

if TYPE_CHECKING:
    from hpctrain.bench.scaling.measured import Measured
    from hpctrain.config.sections import Config, LaunchConfig
    from hpctrain.parallel.plan import Footprint, Weighed

LARGEST_GROUP = 8
"""Ranks of a tensor group, unless the run file says how many a node has."""
LARGEST_PIPELINE = 8
"""Stages, unless the run file asks for more."""
MOST_RANKS = 100_000
"""Each of which gets its part of sharded optimizers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.py."""
    parser.add_argument("run_file", help="what to train; its task is made in this process, and trained for one step")
    parser.add_argument("-n", "--ranks", type=int, required=True, help="ranks of the run")
    parser.add_argument(
        "--memory",
        type=num_bytes,
        metavar="SIZE",
        help="of a rank, such as 80G; 64 if the run needs more (default: what launch.slurm.memory gives a rank)",
    )
    parser.add_argument(
        "--measured",
        metavar="FOLDER",
        help="what hpctrain bench scaling left, for seconds of a step (default: runs/<name>-scaling, if it is there)",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the plans into this SVG file")
    parser.add_argument("--keep", action="store_true", help="keep the plans in the run folder, for hpctrain report")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(overrides=[])
    parser.epilog = "Any key of the run file can be given as an option that wins over it: --train.accumulate 4"


def num_bytes(text: str) -> int:
    """Of a size such as 512M or 1.5G, in powers of 1024 as Slurm has them."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write one such as 80G")
    size = round(float(found[1]) * UNITS[found[2].upper()])
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} leaves a rank nothing: write a size such as 80G")
    return size


def run(args: argparse.Namespace) -> int:
    """See cli.py."""
    from hpctrain.comm.world import undivided
    from hpctrain.config.loading import load
    from hpctrain.parallel.plan import Plan, cheapest, footprints
    from hpctrain.rank.weighing import program_bytes

    if not 1 <= args.ranks <= MOST_RANKS:
        raise UserError(f"-n is {args.ranks}", f"give the number of ranks, from 1 to {MOST_RANKS}")
    config = load(args.run_file, args.overrides)
    memory = args.memory or memory_of(config.launch)
    program = program_bytes()
    sizes = group_sizes(config, args.ranks)
    weighed, reasons = weigh_all(config, sizes, args.ranks)
    if not weighed:
        raise UserError(next(iter(reasons.values())), "start another number of ranks, or choose another global batch")
    shared = {tensor * pipeline for tensor, model in weighed.items() for pipeline in (1, *model.stages)}
    samples = {size: largest_micro_batch(config, args.ranks // size) for size in shared}
    found = footprints(weighed, args.ranks, samples, program, config.train.accumulate)
    measured, note = measurement(config, args, weighed)
    rows = [timed(one, config, weighed, measured) for one in found]
    given = config.parallel
    size = given.tensor * given.pipeline
    shard = given.shard if args.ranks > size and given.pipeline == 1 else "none"  # of stages only whole states are told
    given_plan = Plan(given.tensor, args.ranks // size, shard, given.pipeline)
    own = next((one for one in found if one.plan == given_plan), None)
    plans = plans_of(rows, memory)
    if args.picture:
        draw(plans, Path(args.picture))
    if args.keep:
        keep(plans, RunDir.for_config(config))
    if args.json:
        told = {
            "plans": [one.to_json() for one in rows],
            "not_possible": reasons,
            "memory": memory,
            "no_step_because": note,
        }
        foreign_text.show(json.dumps(told, indent=1))
    else:
        show(rows, reasons, memory)
        if line := note or told_fastest(rows, memory):
            foreign_text.show(line)
    if own is None:
        kinds = [str(given.tensor), *([PIPELINED] if given.pipeline > 1 else []), shard]
        why = [reasons[kind] for kind in kinds if kind in reasons] if args.ranks % size == 0 else []
        what = why[0] if why else undivided(args.ranks, given.tensor, given.pipeline)
        raise UserError(what, "choose one of the plans above")
    if memory is None or own.total <= memory:
        return ExitCode.DONE
    fitting = cheapest(found, memory)
    what = f"a rank of {args.run_file} needs {size_of(own.total)}, and has {size_of(memory)}"
    if fitting is None:
        fix = "give it more memory, a smaller batch, or train.recompute for its largest layers: no plan above fits"
        raise UserError(what, fix)
    raise UserError(what, f"write {fitting.plan.keys}: {size_of(fitting.total)}")


def measurement(
    config: Config, args: argparse.Namespace, weighed: Mapping[int, Weighed]
) -> tuple[Measured | None, str | None]:
    """What ``hpctrain bench scaling`` measured, or why there is nothing. Raises UserError if a folder was named."""
    from hpctrain.bench.scaling import measured

    folder = Path(args.measured or f"runs/{config.name}-scaling")
    if args.measured is None and not (folder / measured.RESULT).exists():
        return None, f"for seconds of a step, measure whole models first: hpctrain bench scaling {args.run_file}"
    try:
        found = measured.read(folder)
        if 1 in weighed and found.steps.gradients.bytes != weighed[1].exchanged:
            mine, theirs = size_of(weighed[1].exchanged), size_of(found.steps.gradients.bytes)
            what = f"{folder} was measured with {theirs} of gradients, and {args.run_file} has {mine}"
            raise UserError(what, measured.AGAIN)
    except UserError as error:
        if args.measured is not None:
            raise
        return None, f"no seconds of a step: {error.what}; {error.fix}"
    return found, None


def timed(footprint: Footprint, config: Config, weighed: Mapping[int, Weighed], measured: Measured | None) -> Row:
    """A plan with the seconds of its step."""
    from hpctrain.bench.scaling.plan_steps import Batch, plan_step
    from hpctrain.train.plan import global_batch

    plan = footprint.plan
    samples = global_batch(config.train, plan.data)
    if measured is None:
        return Row(footprint, None, samples)
    model = weighed[plan.tensor] if plan.pipeline == 1 else weighed[plan.tensor].stages[plan.pipeline]
    model = model.tables if plan.shard == "tables" and model.tables else model
    node = ranks_of_node(config)
    return Row(footprint, plan_step(plan, model, Batch(samples, config.train.accumulate), node, measured), samples)


def memory_of(launch: LaunchConfig) -> int | None:
    """Bytes of a rank that a job asks for; None if it does not say, or if ranks have GPUs, whose memory it is not."""
    given = re.fullmatch(r"(\d+)([KMGT]?)(/cpu)?", launch.slurm.memory or "")
    if given is None or launch.slurm.gpus_per_node or not int(given[1]):
        return None
    size = int(given[1]) * UNITS[given[2] or "M"]
    return size * (launch.slurm.cpus_per_rank or 1) if given[3] else size // (launch.ranks_per_node or 1)


def ranks_of_node(config: Config) -> int | None:
    """As far as the run file says it."""
    return config.launch.ranks_per_node or config.launch.slurm.gpus_per_node


def group_sizes(config: Config, ranks: int) -> list[int]:
    """Of tensor groups: they divide the ranks, and lie within a node."""
    node = ranks_of_node(config)
    limit = LARGEST_GROUP if node is None else node
    whole = math.gcd(ranks, node or ranks)
    sizes = {size for size in range(1, min(limit, whole) + 1) if whole % size == 0}
    return sorted(sizes | {config.parallel.tensor} if whole % config.parallel.tensor == 0 else sizes)


def weigh_all(config: Config, sizes: Sequence[int], ranks: int) -> tuple[dict[int, Weighed], dict[str, str]]:
    """Of each size of tensor groups what a rank has, and why others, and sharded optimizers, cannot be.

    Raises UserError for the whole model.
    """
    from hpctrain.rank.weighing import require_stages, require_tables, rows_of, share_of, weigh

    weighed: dict[int, Weighed] = {}
    reasons: dict[str, str] = {}
    unstaged = None
    try:
        if ranks > 1:
            require_stages(config, max(config.parallel.pipeline, 2))
    except UserError as error:
        unstaged = error.what
    for size in sizes:
        try:
            largest_micro_batch(config, ranks // size, size)
        except UserError as error:  # of this many groups
            reasons[str(size)] = error.what
            continue
        try:
            pipelines = pipeline_sizes(config, ranks // size) if unstaged is None else []
            weighed[size] = weigh(config, size, ranks, pipelines)
        except UserError as error:
            if size == 1:
                raise
            reasons[str(size)] = error.what
    for shard in SHARDS:
        for size in [size for size in weighed if ranks > size and (shard != "tables" or size == 1)]:
            plan, model = (config, size, ranks // size), weighed[size]
            try:
                if shard == "tables":  # not told of tasks that mark none, unless they ask for it
                    if model.tables or config.parallel.shard == "tables":
                        require_tables(config, ranks)
                elif shard == "optimizer":
                    weighed[size] = dataclasses.replace(model, largest_share=share_of(*plan))
                else:
                    weighed[size] = dataclasses.replace(model, by_rows=rows_of(*plan))
            except UserError as error:
                reasons[shard] = error.what
                weighed[size] = dataclasses.replace(model, tables=None) if shard == "tables" else model
                break
    return weighed, reasons | ({PIPELINED: unstaged} if unstaged else {})


def pipeline_sizes(config: Config, ranks: int) -> list[int]:
    """Numbers of stages among which so many tensor groups can share out models on as many samples as they need."""
    sizes = {size for size in (*range(2, LARGEST_PIPELINE + 1), config.parallel.pipeline) if size > 1}
    able = []
    for size in sorted(size for size in sizes if ranks % size == 0):
        with suppress(UserError):
            largest_micro_batch(config, ranks // size)
            able.append(size)
    return able


def largest_micro_batch(config: Config, data: int, each: int = 1) -> int:
    """Samples of one pass of a rank, at a number of groups of ranks that see different ones."""
    from hpctrain.train.plan import global_batch

    share = -(-global_batch(config.train, data, each) // data)
    return -(-share // config.train.accumulate)
