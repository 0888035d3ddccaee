"""Train many models on ranks, and compare each with one process on the global batches. Independent of frameworks."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.data.order import part_of
from hpctrain.errors import RunFailed, UserError
from tests.support.attempts import furthest

UPDATES, SAMPLES = 3, 9
"""Number and size of global batches: parts are uneven on 2 and 4 ranks, and none has fewer than 2 samples."""
PATIENCE_S = 60.0
"""How long a crashed rank waits for the others, which hang in an exchange unless they crashed, too."""

Batch = dict[str, NDArray[Any]]
Weights = list[NDArray[np.float64]]


class Judged(Protocol):
    """A model and its training."""

    @property
    def accuracy(self) -> float:
        """Largest allowed difference between ranks and one process."""


Problem = TypeVar("Problem", bound=Judged)


@dataclass(frozen=True)
class Found:
    """Result for one model."""

    accuracy: float
    """Largest allowed difference."""
    difference: float | None = None
    """Largest difference of a weight between ranks and one process, relative to the weight or to 1 if larger."""
    equal: bool = False
    """Whether weights are bitwise identical on all ranks."""
    moved: bool = False
    """Whether any weight changed."""
    refusal: str | None = None
    """Message with which the model was refused."""
    crash: str | None = None
    """Traceback of any other error."""


def sweep(
    problems: Mapping[str, Problem],
    group: Group,
    train: Callable[[Problem], tuple[Weights, Weights]],
    exact: Callable[[Problem], Weights],
    missing: set[str],
) -> None:
    """Train the problems named on the command line, by default all; rank 0 prints the results as JSON.

    Args:
        problems: problems by name.
        group: the ranks.
        train: trains on all ranks, and returns the weights before and after.
        exact: trains in this process alone, without hpctrain; each rank calls it for some of the problems.
        missing: classes that lack a problem.
    """
    names = sys.argv[1:] or list(problems)
    trained = {name: _train(problems[name], group, train) for name in names}
    compared = {name: _compare(problems[name], *trained[name], exact) for name in names[group.rank :: group.size]}
    everywhere = group.allgather({name: asdict(found) for name, found in compared.items()}, "compare the models")
    if group.rank == 0:
        found = {name: each for rank in everywhere for name, each in rank.items()}
        print(json.dumps({"found": found, "missing": sorted(missing)}))


def _train(
    problem: Problem, group: Group, train: Callable[[Problem], tuple[Weights, Weights]]
) -> tuple[Found, Weights]:
    found, before, after = Found(problem.accuracy), [], []
    try:
        before, after = train(problem)
    except UserError as error:
        found = replace(found, refusal=str(error))
    except Exception:
        found = replace(found, crash=traceback.format_exc())
    mine = [found.refusal, [weight.tobytes().hex() for weight in after]]
    everywhere = _together(group, mine, found.crash)
    moved = any(not np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    return replace(found, equal=all(each == everywhere[0] for each in everywhere), moved=moved), after


def _together(group: Group, value: Any, crash: str | None) -> list[Any]:
    """Gather the values of all ranks; abort them all if this one alone has crashed."""
    try:
        return group.allgather(value, "compare the weights", PATIENCE_S if crash else TIMEOUT_S)
    except RunFailed:
        print(crash, file=sys.stderr, flush=True)
        group.comm.Abort(1)  # type: ignore[union-attr]
        raise


def _compare(problem: Problem, found: Found, after: Weights, exact: Callable[[Problem], Weights]) -> Found:
    if found.refusal or found.crash:
        return found
    try:
        return replace(found, difference=furthest(after, exact(problem)))
    except Exception:
        return replace(found, crash=traceback.format_exc())


def numbers(shape: tuple[int, ...], below: int | None = None) -> NDArray[Any]:
    """A fixed array for all samples of all batches: float32, or int64 in [0, below)."""
    random = np.random.default_rng(11)
    whole = (UPDATES * SAMPLES, *shape)
    return random.normal(size=whole).astype(np.float32) if below is None else random.integers(0, below, whole)


def batches(everything: Batch) -> list[Batch]:
    """Split all samples into global batches, in order."""
    begins = range(0, UPDATES * SAMPLES, SAMPLES)
    return [{name: array[begin : begin + SAMPLES] for name, array in everything.items()} for begin in begins]


def micro_batches(batch: Batch, group: Group, accumulate: int) -> list[Batch]:
    """Split this rank's part of a global batch into micro-batches."""
    part = part_of(SAMPLES, group.rank, group.size)
    begin, count = part.start, part.stop - part.start
    pieces = [part_of(count, piece, accumulate) for piece in range(min(accumulate, count))]
    return [
        {name: array[begin + piece.start : begin + piece.stop] for name, array in batch.items()} for piece in pieces
    ]


def code(cls: type, above: type) -> str:
    """Source code of a class and its bases up to ``above``, without docstrings."""
    parts = []
    for base in cls.__mro__[: cls.__mro__.index(above)]:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        parts.append(ast.unparse(tree))
    return "\n".join(parts)
