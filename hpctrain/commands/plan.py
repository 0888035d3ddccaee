"""``hpctrain plan``: what a rank needs under each plan that fits the ranks, before a job is submitted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hpctrain.errors import ExitCode, UserError
from hpctrain.system import foreign_text

if TYPE_CHECKING:
    from hpctrain.config.sections import Config
    from hpctrain.parallel.plan import Footprint, Weighed

LARGEST_GROUP = 8
"""Ranks of a tensor group, unless the run file says how many a node has."""
SHARDED = "optimizer"
"""Stands for the plan with ``parallel.shard: optimizer`` among the reasons why others cannot be."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
WIDTH = 110
"""Characters of the table, however narrow the terminal is."""
PARTS = ("program", "parameters", "gradients", "optimizer", "averages", "activations", "staging", "total")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.py."""
    parser.add_argument("run_file", help="what to train; its task is made in this process, and trained for one step")
    parser.add_argument("-n", "--ranks", type=int, required=True, help="ranks of the run")
    parser.add_argument(
        "--memory", type=num_bytes, metavar="SIZE", help="of a rank, such as 80G; 64 if the run needs more"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(overrides=[])
    parser.epilog = "Any key of the run file can be given as an option that wins over it: --train.accumulate 4"


def num_bytes(text: str) -> int:
    """Of a size such as 512M or 1.5G, in powers of 1024 as Slurm has them."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write one such as 80G")
    return round(float(found[1]) * UNITS[found[2].upper()])


def run(args: argparse.Namespace) -> int:
    """See cli.py."""
    from hpctrain.config.loading import load
    from hpctrain.parallel.plan import Plan, cheapest, footprints
    from hpctrain.rank.weighing import program_bytes

    config = load(args.run_file, args.overrides)
    if args.ranks < 1:
        raise UserError(f"-n is {args.ranks}", "give the number of ranks, 1 or more")
    program = program_bytes()
    sizes = group_sizes(config, args.ranks)
    weighed, reasons = weigh_all(config, sizes, args.ranks)
    if not weighed:
        raise UserError(next(iter(reasons.values())), "start another number of ranks, or choose another global batch")
    samples = {size: largest_micro_batch(config, args.ranks // size) for size in weighed}
    found = footprints(weighed, args.ranks, samples, program)
    given = config.parallel
    given_plan = Plan(given.tensor, args.ranks // given.tensor, given.shard if args.ranks > 1 else "none")
    own = next((one for one in found if one.plan == given_plan), None)
    if args.json:
        plans = [one.to_json() for one in found]
        foreign_text.show(json.dumps({"plans": plans, "not_possible": reasons, "memory": args.memory}, indent=1))
    else:
        show(found, reasons, args.memory)
    if own is None:
        what = reasons.get(str(given.tensor)) or (reasons.get(SHARDED) if given.tensor == 1 else None)
        raise UserError(
            what or f"parallel.tensor is {given.tensor}, and {args.ranks} ranks do not divide into groups of that size",
            "choose one of the plans above",
        )
    if args.memory is None or own.total <= args.memory:
        return ExitCode.DONE
    fitting = cheapest(found, args.memory)
    what = f"a rank of {args.run_file} needs {size_of(own.total)}, and has {size_of(args.memory)}"
    if fitting is None:
        fix = "give it more memory, a smaller batch, or train.recompute for its largest layers: no plan above fits"
        raise UserError(what, fix)
    raise UserError(what, f"write {fitting.plan.keys}: {size_of(fitting.total)}")


def group_sizes(config: Config, ranks: int) -> list[int]:
    """Of tensor groups: they divide the ranks, and lie within a node."""
    slurm = config.launch.slurm
    node = config.launch.ranks_per_node or slurm.gpus_per_node
    limit = LARGEST_GROUP if node is None else node
    whole = math.gcd(ranks, node or ranks)
    sizes = {size for size in range(1, min(limit, whole) + 1) if whole % size == 0}
    return sorted(sizes | {config.parallel.tensor} if whole % config.parallel.tensor == 0 else sizes)


def weigh_all(config: Config, sizes: Sequence[int], ranks: int) -> tuple[dict[int, Weighed], dict[str, str]]:
    """Of each size of tensor groups what a rank has, and why others, and sharded optimizers, cannot be.

    Raises UserError for the whole model.
    """
    from hpctrain.rank.weighing import share_of, weigh

    weighed: dict[int, Weighed] = {}
    reasons: dict[str, str] = {}
    for size in sizes:
        try:
            largest_micro_batch(config, ranks // size)
        except UserError as error:  # of this many groups
            reasons[str(size)] = error.what
            continue
        try:
            weighed[size] = weigh(config, size, ranks)
        except UserError as error:
            if size == 1:
                raise
            reasons[str(size)] = error.what
    if ranks > 1 and 1 in weighed:
        try:
            weighed[1] = dataclasses.replace(weighed[1], largest_share=share_of(config, ranks))
        except UserError as error:
            reasons[SHARDED] = error.what
    return weighed, reasons


def largest_micro_batch(config: Config, data: int) -> int:
    """Samples of one pass of a rank, at a number of ranks that see different ones."""
    from hpctrain.train.plan import global_batch

    share = -(-global_batch(config.train, data) // data)
    return -(-share // config.train.accumulate)


def show(found: Sequence[Footprint], reasons: Mapping[str, str], limit: int | None) -> None:
    """A table, and what cannot be."""
    from rich.console import Console
    from rich.table import Table

    unit = "G" if max(one.total for one in found) >= 10 * UNITS["G"] else "M"
    parts = [name for name in PARTS if any(getattr(one, name) for one in found)]
    table = Table("tensor", "data", "shard", box=None, title=f"{unit}iB of a rank", title_justify="left")
    for name in [*parts, *(["fits"] if limit else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        plan = one.plan
        values = [f"{getattr(one, name) / UNITS[unit]:.1f}" for name in parts]
        fits = [] if limit is None else ["yes" if one.total <= limit else "no"]
        table.add_row(str(plan.tensor), str(plan.data), plan.shard, *values, *fits)
    Console(width=max(shutil.get_terminal_size().columns, WIDTH)).print(table)
    foreign_text.show(f"\na checkpoint has {size_of(found[0].checkpoint)}")
    for plan_or_size, reason in reasons.items():
        which = {SHARDED: "with shard: optimizer", "1": "with whole models"}
        foreign_text.show(f"not {which.get(plan_or_size, f'in groups of {plan_or_size}')}: {reason}")


def size_of(count: int) -> str:
    """Of bytes, for people."""
    for unit, factor in reversed(UNITS.items()):
        if count >= factor:
            return f"{count / factor:.3g} {unit}iB"
    return f"{count} B"
