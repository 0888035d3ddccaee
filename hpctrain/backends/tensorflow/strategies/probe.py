"""Finds how a Keras optimizer's variables can be sharded, by trying copies of it on small variables.

All variables are tried together and under their own names, since some optimizers (Muon) act by name.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from numpy.typing import NDArray

from hpctrain.backends.tensorflow.state.tensors import flat, slots_of
from hpctrain.errors import UserError
from hpctrain.parallel.sharded import LEAST_RATE, STEPS, small, uneven_rows

VECTOR = 32
"""Elements per cut: a multiple of any SIMD width. Kernels may round a remainder differently (the last bit of a root),
which says nothing about the optimizer."""


@dataclass(frozen=True)
class OptimizerTraits:
    """How an optimizer's variables can be sharded."""

    is_alone: bool
    """Whether each variable's update is independent of the others; if not, they cannot be sharded."""
    by_rows: tuple[bool, ...]
    """For each variable, whether its rows can be updated separately with bitwise identical results."""
    common: frozenset[str]
    """Names of slots that are not cut with the rows."""


@dataclass(frozen=True)
class Tried:
    """A small stand-in for a variable."""

    weight: keras.Variable
    value: NDArray[Any]
    gradients: tuple[NDArray[Any], ...]
    """One gradient per step."""


@dataclass(frozen=True)
class Trial:
    """Variables and slots after a few steps."""

    values: Mapping[int, NDArray[Any]]
    """Values by index."""
    slots: Mapping[int, Mapping[str, NDArray[Any]]]
    others: Sequence[NDArray[Any]]
    """Optimizer variables that belong to no weight."""


def try_optimizer(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> OptimizerTraits:
    """Updates small variables whole, in halves of the set, and cut into rows, on copies of the optimizer.

    Args:
        optimizer: the task's optimizer, not built.
        variables: the variables that it will update.

    Raises:
        UserError: it cannot be copied, or fails on the copies.
    """
    random = np.random.default_rng(1)
    steps = STEPS * (optimizer.gradient_accumulation_steps or 1)
    rate = rate_of(optimizer)
    every = {index: drawn(variable, random, steps, min(1.0, 10 * rate)) for index, variable in enumerate(variables)}
    try:
        with names_kept():
            kinds = kinds_of(Copy(optimizer, rate, every).trial().slots, every)
            chosen = [members[0] for members in kinds] if len(kinds) > 1 else kinds[0][:2]
            tried = {index: every[index] for index in chosen}
            whole = run(optimizer, rate, tried)
            halves = [dict(list(tried.items())[first::2]) for first in range(2)]
            by_half = [run(optimizer, rate, half) for half in halves if half]
            parts = [run(optimizer, rate, some) for some in cut(tried)]
    except Exception as error:
        raise UserError(
            f"{type(optimizer).__name__} fails on small copies of its variables in the test before sharding: "
            f"{type(error).__name__}: {error}",
            "use an optimizer that can be copied and updates what apply gives it, or leave parallel.shard out",
        ) from error
    common = frozenset(
        name
        for index, slots in whole.slots.items()
        for name, slot in slots.items()
        if slot.shape != every[index].value.shape
    )
    by_rows = [False] * len(variables)
    for members in kinds:
        goes = all(goes_by_rows(tried[index], index, whole, parts, common) for index in members if index in tried)
        for index in members:
            plain = variables[index].constraint is None and not variables[index].overwrite_with_gradient
            by_rows[index] = goes and plain and not optimizer.clipnorm
    is_alone = all(found_in(trial, whole) for trial in by_half)
    return OptimizerTraits(
        is_alone and all(equal(trial.others, whole.others) for trial in parts), tuple(by_rows), common
    )


def kinds_of(slots: Mapping[int, Mapping[str, NDArray[Any]]], every: Mapping[int, Tried]) -> list[list[int]]:
    """Groups indices of variables that an optimizer treats the same.

    They have equal shapes, dtypes and slots, and names that differ only in digits.
    """
    found: dict[object, list[int]] = {}
    for index, one in every.items():
        made = tuple(sorted((name, slot.shape) for name, slot in slots[index].items()))
        name = re.sub(r"\d", "", one.weight.path)
        found.setdefault((one.value.shape, one.weight.dtype, name, made), []).append(index)
    return list(found.values())


def cut(tried: Mapping[int, Tried]) -> Iterator[dict[int, Tried]]:
    """Yields the first parts of all variables, then the second, and so on; some have fewer parts."""
    cuts = {index: cuts_of(one.value.shape) for index, one in tried.items()}
    for number in range(max(map(len, cuts.values()))):
        yield {index: part_of(one, cuts[index][number]) for index, one in tried.items() if number < len(cuts[index])}


def found_in(some: Trial, whole: Trial) -> bool:
    """Whether variables are bitwise identical to those updated together with all others."""
    return (
        equal(some.others, whole.others)
        and all(equal([value], [whole.values[index]]) for index, value in some.values.items())
        and all(same_slots(slots, whole.slots[index]) for index, slots in some.slots.items())
    )


def goes_by_rows(tried: Tried, index: int, whole: Trial, parts: Sequence[Trial], common: frozenset[str]) -> bool:
    """Whether separately updated rows and their slots are bitwise identical to those of the whole variable."""
    own = [part for part in parts if index in part.values]
    first = np.asarray(tf.cast(tried.value, tried.weight.dtype))
    if len(own) < 2 or equal([whole.values[index]], [first]):
        return False
    if not equal([whole.values[index]], [np.concatenate([part.values[index] for part in own])]):
        return False
    for name, slot in whole.slots[index].items():
        if any(name not in part.slots[index] for part in own):
            return False
        cut = [part.slots[index][name] for part in own]
        if name in common:
            if not all(equal([each], [slot]) for each in cut):
                return False
            continue
        shapes = [part.values[index].shape for part in own]
        if [each.shape for each in cut] != shapes or not equal([np.concatenate(cut)], [slot]):
            return False
    return True


def drawn(variable: keras.Variable, random: np.random.Generator, steps: int, scale: float) -> Tried:
    """Draws a small stand-in for a variable."""
    shape = even(small(tuple(variable.shape)))
    gradients = tuple(random.choice([1.0, 3.0]) * random.normal(size=shape) for _ in range(steps))
    return Tried(variable, scale * np.asarray(random.normal(size=shape)), gradients)


def even(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Pads a shape so that rows, or parts of a vector, are multiples of VECTOR."""
    if not shape or shape[0] < 2:
        return shape
    count = -(-shape[-1] // VECTOR)
    return (*shape[:-1], VECTOR * (count if len(shape) > 1 else max(3, count)))


def cuts_of(shape: tuple[int, ...]) -> list[slice]:
    """Uneven parts of the first axis; for vectors in multiples of VECTOR."""
    if len(shape) != 1 or shape[0] < 2:
        return uneven_rows(shape)
    return [slice(VECTOR * one.start, VECTOR * one.stop) for one in uneven_rows((shape[0] // VECTOR,))]


def part_of(tried: Tried, rows: slice) -> Tried:
    """Rows of a stand-in; a scalar is returned unchanged."""
    if not tried.value.ndim:
        return tried
    return replace(tried, value=tried.value[rows], gradients=tuple(one[rows] for one in tried.gradients))


def stand_in(whole: keras.Variable, value: Any) -> keras.Variable:
    """Makes a variable with another value, and perhaps shape, that an optimizer treats like the whole one."""
    *scopes, name = whole.path.split("/")
    with contextlib.ExitStack() as stack:
        for number, scope in enumerate(scopes):
            stack.enter_context(keras.name_scope(scope, override_parent=None if number else ""))
        part = keras.Variable(tf.cast(value, whole.dtype), dtype=whole.dtype, name=name)
    part.constraint = whole.constraint
    part.overwrite_with_gradient = whole.overwrite_with_gradient
    return part


def build_on(
    optimizer: keras.optimizers.Optimizer, wholes: Sequence[keras.Variable], parts: Sequence[keras.Variable]
) -> None:
    """Builds an optimizer on parts instead of whole variables, keeping exclusions from weight decay.

    Args:
        optimizer: the optimizer, not built.
        wholes: whole variables, some perhaps excluded from weight decay.
        parts: replacements in the same order; further ones may follow.
    """
    known = vars(optimizer)
    if excluded := known.get("_exclude_from_weight_decay"):
        pattern = known.get("_exclude_from_weight_decay_pattern")
        pairs = zip(wholes, parts, strict=False)
        left_out = [part for whole, part in pairs if optimizer._var_key(whole) in excluded]
        optimizer.exclude_from_weight_decay(left_out, None if pattern is None else [pattern.pattern])
    optimizer.build(list(parts))


class Copy:
    """A copy of an optimizer, built on stand-ins.

    Args:
        optimizer: the optimizer to copy, not built.
        rate: learning rate that replaces a schedule or 0.
        every: stand-ins by index.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, rate: float, every: Mapping[int, Tried]) -> None:
        self.every = every
        self.optimizer = copied(optimizer)
        if not isinstance(optimizer._learning_rate, keras.Variable):
            self.optimizer.learning_rate = lambda: tf.constant(rate, tf.float32)
        elif not float(optimizer.learning_rate):
            self.optimizer.learning_rate = rate
        self.parts = [stand_in(one.weight, one.value) for one in every.values()]
        build_on(self.optimizer, [one.weight for one in every.values()], self.parts)

    def step(self, number: int) -> None:
        """Makes update ``number``."""
        given = [tf.cast(one.gradients[number], part.dtype) for one, part in self.pairs()]
        self.optimizer.apply(given, self.parts)

    def trial(self) -> Trial:
        """Returns the current values and slots."""
        index_of = {flat(one.weight.path): index for index, one in self.every.items()}
        slots: dict[int, dict[str, NDArray[Any]]] = {index: {} for index in self.every}
        others = []
        for variable, slot, weight in slots_of(self.optimizer, list(index_of)):
            if weight:
                slots[index_of[weight]][slot] = np.asarray(variable.value)
            else:
                others.append(np.asarray(variable.value))
        return Trial({i: np.asarray(part.value) for i, part in zip(self.every, self.parts, strict=True)}, slots, others)

    def pairs(self) -> Iterator[tuple[Tried, keras.Variable]]:
        """Pairs of stand-ins and their variables in this copy."""
        return zip(self.every.values(), self.parts, strict=True)


def run(optimizer: keras.optimizers.Optimizer, rate: float, every: Mapping[int, Tried]) -> Trial:
    """Runs all steps on a copy; returns the outcome."""
    own = Copy(optimizer, rate, every)
    for number in range(len(next(iter(every.values())).gradients)):
        own.step(number)
    return own.trial()


def copied(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Copies an optimizer with its settings. Keras' own way of copying works only for registered classes."""
    own: keras.optimizers.Optimizer = object.__new__(type(optimizer))
    strategy = optimizer._distribution_strategy
    own.__dict__.update(copy.deepcopy(vars(optimizer), {id(optimizer): own, id(strategy): strategy}))
    return own


def rate_of(optimizer: keras.optimizers.Optimizer) -> float:
    """A nonzero learning rate for trials."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate)) or LEAST_RATE


@contextlib.contextmanager
def names_kept() -> Iterator[None]:
    """Restores Keras' counters of automatic names, so that later variables are named as if none were made here."""
    counted = global_state.get_global_attribute("object_name_uids")
    before = None if counted is None else counted.copy()
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", before)


def same_slots(ones: Mapping[str, NDArray[Any]], others: Mapping[str, NDArray[Any]]) -> bool:
    """Whether slots are bitwise identical."""
    return ones.keys() == others.keys() and all(equal([one], [others[name]]) for name, one in ones.items())


def equal(ones: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> bool:
    """Whether arrays are bitwise identical."""
    return len(ones) == len(others) and all(
        one.shape == other.shape and one.tobytes() == other.tobytes() for one, other in zip(ones, others, strict=True)
    )
