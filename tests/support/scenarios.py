"""Programs that run many scenarios on one launch of ranks, and scenarios that are the same in both frameworks."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpctrain.comm.group import Group
from hpctrain.comm.world import connect
from hpctrain.train.evaluation import evaluate
from hpctrain.train.framework import NonFiniteLoss

Cut = Callable[..., list[dict[str, Any]]]
"""``cut(batch, rank, ranks, accumulate=1)``: a rank's micro-batches of a global batch."""


def main(scenarios: Mapping[str, Callable[..., Any]], names: Sequence[str], *given: object) -> None:
    """Run the named scenarios, by default all, with the world and what is given; rank 0 prints the results as JSON.

    A rank that fails ends the others, which would wait for it forever.
    """
    world = connect()
    found = {}
    try:
        for name in names or scenarios:
            begin = time.perf_counter()
            found[name] = scenarios[name](world, *given)
            print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        if world.everyone.comm:
            world.everyone.comm.Abort(1)
        raise
    if world.rank == 0:
        print(json.dumps(found))


def not_finite(framework: Any, group: Group, batch: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Ranks at fault, and whether weights are unchanged, after a NaN in the last rank's last sample, for each rank."""
    spoiled = {**batch, "x": batch["x"].copy()}
    spoiled["x"][-1, 0] = float("nan")
    before, said = framework.weights_hash(), None
    try:
        framework.step(cut(spoiled, group.rank, group.size), len(batch["x"]))
    except NonFiniteLoss as error:
        said = error.ranks
    same = framework.weights_hash() == before
    framework.close()
    return {"ranks": group.allgather(said, "say it"), "unchanged": group.allgather(same, "say it")}


def evaluated(framework: Any, group: Group, samples: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Validation sums over the ranks' parts, and predictions in order."""
    parts = cut(samples, group.rank, group.size)
    found = [framework.evaluate(part) for part in parts]
    outputs = [framework.predict(part)["output"].sum(1).tolist() for part in parts]
    framework.close()
    return {"sums": group.allgather(found, "evaluate"), "outputs": _in_order(group, outputs)}


def judged(framework: Any, group: Group, samples: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Stateful metrics over parts of different size, and outputs in order."""
    batches = [batch for part in cut(samples, group.rank, group.size) for batch in cut(part, 0, 1, accumulate=7)]
    found = evaluate(framework, {"dev": batches, "hard": batches[:1]}, group)
    outputs = [framework.predict(batch)["output"].tolist() for batch in batches]
    framework.close()
    return {
        "metrics": group.allgather(dict(found.metrics), "evaluate"),
        "figures": sorted(found.figures),
        "classes": samples["y"].tolist(),
        "weights": samples["w"].tolist(),
        "outputs": _in_order(group, outputs),
    }


def _in_order(group: Group, outputs: list[Any]) -> list[Any]:
    """Rows of all ranks' batches."""
    return [row for rank in group.allgather(outputs, "predict") for part in rank for row in part]
