"""Training of many models on ranks, each beside one process with the joined batches. Knows no framework."""

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
"""Global batches and their size: the parts of 2 and of 4 ranks differ, and none has fewer than 2 samples."""
PATIENCE_S = 60.0
"""For the other ranks where this one has crashed: where they have not, they wait for it in an exchange."""

Batch = dict[str, NDArray[Any]]
Weights = list[NDArray[np.float64]]


class Judged(Protocol):
    """Any model and its training."""

    @property
    def accuracy(self) -> float:
        """Largest difference between ranks and one process."""


Problem = TypeVar("Problem", bound=Judged)


@dataclass(frozen=True)
class Found:
    """What came of one model."""

    accuracy: float
    """That is expected."""
    difference: float | None = None
    """Largest one between a weight on ranks and in one process, relative to the larger of 1 and the weight."""
    equal: bool = False
    """Whether all ranks hold the same weights, bit for bit."""
    moved: bool = False
    """Whether weights changed at all."""
    refusal: str | None = None
    """The sentence with which the model was refused."""
    crash: str | None = None
    """Any other error."""


def sweep(
    problems: Mapping[str, Problem],
    group: Group,
    train: Callable[[Problem], tuple[Weights, Weights]],
    exact: Callable[[Problem], Weights],
    missing: set[str],
) -> None:
    """Trains the problems that the command line names, all by default; rank 0 prints what it found by name, as JSON.

    Args:
        problems: by name.
        group: the ranks.
        train: trains on all ranks; weights before and after.
        exact: trains in this process alone by nothing of hpctrain; each rank does so for some of the problems.
        missing: classes that should be among the problems and are not.
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
    """The values of all ranks; ends them all where this one alone has crashed."""
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
    """One array for all samples of all batches, always the same: float32, or int64 from 0 to below."""
    random = np.random.default_rng(11)
    whole = (UPDATES * SAMPLES, *shape)
    return random.normal(size=whole).astype(np.float32) if below is None else random.integers(0, below, whole)


def batches(everything: Batch) -> list[Batch]:
    """Global batches, in order."""
    begins = range(0, UPDATES * SAMPLES, SAMPLES)
    return [{name: array[begin : begin + SAMPLES] for name, array in everything.items()} for begin in begins]


def micro_batches(batch: Batch, group: Group, accumulate: int) -> list[Batch]:
    """This rank's part of a global batch, in pieces."""
    part = part_of(SAMPLES, group.rank, group.size)
    begin, count = part.start, part.stop - part.start
    pieces = [part_of(count, piece, accumulate) for piece in range(min(accumulate, count))]
    return [
        {name: array[begin + piece.start : begin + piece.stop] for name, array in batch.items()} for piece in pieces
    ]


def code(cls: type, above: type) -> str:
    """Of a class and its bases below one of them, without docstrings."""
    parts = []
    for base in cls.__mro__[: cls.__mro__.index(above)]:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        parts.append(ast.unparse(tree))
    return "\n".join(parts)
