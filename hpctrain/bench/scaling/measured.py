"""What ``hpctrain bench scaling`` left in a folder, for those who go by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.bench.scaling.fit import ExchangeModel, Link, Shape, least_squares
from hpctrain.bench.scaling.model import COMPUTE, DATA, PARTS, REST, Gradients, StepModel, Timing, fit_steps
from hpctrain.errors import UserError
from hpctrain.system import safe_read
from hpctrain.system.json_shape import fits, is_count, is_number, is_time

RESULT = "scaling.json"
"""In the folder."""
WHOLE = {"tensor": 1, "pipeline": 1, "shard": "none"}
AGAIN = "measure again: hpctrain bench scaling, with the run file and options that the plan is made of"


@dataclass(frozen=True)
class Measured:
    """The steps of a run each of whose ranks had the whole model."""

    fixed_s: float
    """Of what a rank computes in a step, whatever its samples."""
    sample_s: float
    """For each sample of a rank."""
    waits_s: float
    """Of a step: for data, and in hooks."""
    steps: StepModel
    """Knows the links, and what exchanges took beyond them."""

    def compute_s(self, samples: float) -> float:
        """Of a rank that has the whole model, and so many samples of a step."""
        return self.fixed_s + self.sample_s * samples


def read(folder: Path) -> Measured:
    """What was measured.

    Raises:
        UserError: the folder has no measurement, or none of whole models.
    """
    path = folder / RESULT
    try:
        found = safe_read.read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", AGAIN) from error
    try:
        if not _is_result(found):
            raise ValueError
        parallel, links, timings = found["parallel"], found["exchange"], timings_of(found["modes"])
        num_bytes, through_mpi = found["gradient_bytes"], not found["reducer"].startswith("horovod")
        exchange = ExchangeModel(_link(links["inside_node"]), _link(links["between_nodes"]))
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is not what this version measures", AGAIN) from error
    if parallel != WHOLE:
        raise UserError(
            f"{path} is of ranks that share out a model",
            "measure whole models: --parallel.tensor 1 --parallel.pipeline 1 --parallel.shard none",
        )
    if not timings:
        raise UserError(f"{path} has no size with a core for each thread", "measure on more cores")
    return measured(timings, exchange, Gradients(num_bytes, through_mpi))


def measured(timings: Sequence[Timing], exchange: ExchangeModel, gradients: Gradients) -> Measured:
    """The constants behind runs of several sizes: from those on the fullest nodes, where ranks share caches and memory.

    What a rank computes grows with its samples from a fixed time on if numbers of samples differ, else in proportion.
    """
    fullest = max(timing.shape.ranks_per_node for timing in timings)
    full = [timing for timing in timings if timing.shape.ranks_per_node == fullest]
    samples = np.array([timing.global_batch / timing.shape.ranks for timing in full])
    seconds = np.array([timing.typical[COMPUTE] for timing in full])
    if len(set(samples.tolist())) > 1:
        fixed_s, sample_s = least_squares(np.stack([np.ones_like(samples), samples], 1), seconds).tolist()
    else:
        fixed_s, sample_s = 0.0, float(np.median(seconds / samples))
    waits_s = float(np.median([timing.typical[DATA] + timing.typical[REST] for timing in full]))
    return Measured(fixed_s, sample_s, waits_s, fit_steps("weak", timings, exchange, gradients))


def timings_of(modes: Mapping[str, Any]) -> list[Timing]:
    """Steps by size and batch, each once; none of those with more threads than cores."""
    found: dict[tuple[Shape, int], Timing] = {}
    for row in (row for mode in modes.values() for row in mode["measured"]):
        if not row["oversubscribed"]:
            nodes, batch = row["nodes"], row["global_batch"]
            shape = Shape(nodes, row["ranks"] // nodes)
            if not shape.ranks:
                raise ValueError
            found[shape, batch] = Timing(shape, batch, np.array([[row[f"{name}_s"] for name in PARTS]], np.float64))
    return list(found.values())


def _link(found: Mapping[str, Any] | None) -> Link | None:
    if found is None:
        return None
    return Link(found["alpha_s"], 1 / found["bytes_per_s"] if found["bytes_per_s"] else 0.0)


def _is_size(value: object) -> bool:
    return is_count(value) and value > 0  # type: ignore[operator]


def _is_positive(value: object) -> bool:
    return is_number(value) and 1e-9 < value < 1e18  # type: ignore[operator]


_ROW = {
    **dict.fromkeys(("nodes", "ranks", "global_batch"), _is_size),
    **dict.fromkeys((f"{name}_s" for name in PARTS), is_time),
    "compute_s": _is_positive,
    "oversubscribed": bool,
}
_LINK = ({"alpha_s": is_time, "bytes_per_s": (_is_positive, None)}, None)
_is_result = fits(
    {
        "reducer": str,
        "gradient_bytes": is_count,
        "exchange": {"inside_node": _LINK, "between_nodes": _LINK},
        "modes": {str: {"measured": [_ROW]}},
    }
)
