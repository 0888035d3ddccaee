"""What ``hpctrain plan`` says: a table, JSON, a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid
from hpctrain.system import foreign_text

if TYPE_CHECKING:
    from hpctrain.bench.scaling.plan_steps import PlanStep
    from hpctrain.parallel.plan import Footprint, Plan
    from hpctrain.run.plans import Plans

PIPELINED = "pipeline"
"""Stands for plans with stages among the reasons why others cannot be."""
SHARDS = ("optimizer", "parameters", "tables")
"""Of ``parallel.shard``; stand for the plans with it among the reasons why others cannot be."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
WIDEST = 1000
"""Characters that the table may have, however narrow the terminal is: no cell is cut short."""
PARTS = ("program", "parameters", "gradients", "optimizer", "averages", "activations", "staging", "total")


@dataclass(frozen=True)
class Row:
    """A plan, and what a rank needs and does under it."""

    footprint: Footprint
    step: PlanStep | None
    """None if nothing is known of it."""
    samples: int
    """Of all ranks in a step."""

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks."""
        return self.samples / self.step.total_s if self.step else None

    def to_json(self) -> dict[str, Any]:
        """Memory; and time, as far as it is known."""
        if self.step is None:
            return self.footprint.to_json()
        of_step = {**dataclasses.asdict(self.step), "step_s": self.step.total_s, "samples_per_s": self.samples_per_s}
        return {**self.footprint.to_json(), "step": of_step}


def show(rows: Sequence[Row], reasons: Mapping[str, str], limit: int | None) -> None:
    """A table, and what cannot be."""
    from rich.console import Console
    from rich.table import Table

    found = [one.footprint for one in rows]
    unit = "G" if max(one.total for one in found) >= 10 * UNITS["G"] else "M"
    parts = [name for name in PARTS if any(getattr(one, name) for one in found)]
    staged = ["pipeline"] if any(one.plan.pipeline > 1 for one in found) else []
    table = Table("tensor", *staged, "data", "shard", box=None, title=f"{unit}iB of a rank", title_justify="left")
    waits = ["bubble"] if staged else []
    times = ["ms a step", "samples/s"] if any(row.step for row in rows) else []
    for name in [*parts, *(["fits"] if limit else []), *waits, *times]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        one, plan = row.footprint, row.footprint.plan
        values = [f"{getattr(one, name) / UNITS[unit]:.1f}" for name in parts]
        fits = [] if limit is None else ["yes" if one.total <= limit else "no"]
        stages, bubbles = ([str(plan.pipeline)], [f"{one.bubble:.0%}"]) if staged else ([], [])
        known = [f"{1e3 * row.step.total_s:.4g}", f"{row.samples_per_s:.4g}"] if row.step else ["", ""]
        told = known if times else []
        table.add_row(str(plan.tensor), *stages, str(plan.data), plan.shard, *values, *fits, *bubbles, *told)
    Console(width=WIDEST).print(table)
    foreign_text.show(f"\na checkpoint has {size_of(found[0].checkpoint)}")
    for plan_or_size, reason in reasons.items():
        which = {PIPELINED: "in stages", "1": "with whole models", **{one: f"with shard: {one}" for one in SHARDS}}
        foreign_text.show(f"not {which.get(plan_or_size, f'in groups of {plan_or_size}')}: {reason}")


def size_of(count: int) -> str:
    """Of bytes, for people."""
    for unit, factor in reversed(UNITS.items()):
        if count >= factor:
            return f"{count / factor:.3g} {unit}iB"
    return f"{count} B"


def told_fastest(rows: Sequence[Row], limit: int | None) -> str:
    """A line about the plan that trains most samples a second; empty if nothing is known of steps."""
    known = [one for one in rows if one.step and (limit is None or one.footprint.total <= limit)]
    if not known:
        return ""
    best = max(known, key=lambda one: one.samples_per_s or 0.0)
    return f"expected to be fastest{' of those that fit' if limit else ''}: {best.footprint.plan.keys}"


def plans_of(rows: Sequence[Row], memory: int | None) -> Plans:
    """As pictures have them."""
    from hpctrain.run.plans import Planned, Plans

    return Plans(
        tuple(
            Planned(
                name_of(one.footprint.plan),
                {name: getattr(one.footprint, name) for name in PARTS[:-1]},
                one.step.total_s if one.step else None,
            )
            for one in rows
        ),
        memory,
    )


def draw(plans: Plans, path: Path) -> None:
    """Writes the picture. Raises RunFailed."""
    from hpctrain.report import plan_plot
    from hpctrain.report.chart import picture
    from hpctrain.system.files import write_atomically

    write_atomically(path, picture([plan_plot.draw(plans)]).encode())


def keep(plans: Plans, run: RunDir) -> None:
    """Leaves them in the run folder, whose report shows them. Raises UserError or RunFailed."""
    from hpctrain.run.plans import write_plans

    run.create()
    write_plans(run.plans, plans, run.path)


def name_of(plan: Plan) -> str:
    """As ``hpctrain status`` has it: ``tensor 2 x data 4, shard optimizer``."""
    grid = Grid(plan.tensor * plan.data * plan.pipeline, plan.tensor, plan.pipeline)
    return (str(grid) or f"data {plan.data}") + (f", shard {plan.shard}" if plan.shard != "none" else "")
