"""Batches from single samples: the user's transform and collate, checks, and stacking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.data.dataset import Dataset, Field, Samples, plain, read_exclusively, users_code, with_place
from hpctrain.data.global_generators import seeded
from hpctrain.data.order import Drawn, RandomStream, keyed_generator
from hpctrain.errors import UserError, foreign_errors, kind_of
from hpctrain.system.array_types import Array, Ints

Sample = dict[str, Array]
"""The arrays of one sample."""
Transform = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
"""transform(sample, rng) returns the new sample; it may modify ``sample`` in place. ``rng`` is keyed by (seed, epoch,
sample, repeat), where repeat counts earlier draws of the sample in the epoch."""
Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
"""collate(samples) turns the samples of one batch into arrays, the first of which has one row per sample."""


@dataclass(frozen=True)
class Recipe:
    """How samples become a batch: transform, collate and the seed of random transforms."""

    transform: Transform | None = None
    """Applied to each sample."""
    collate: Collate | None = None
    """Applied to the list of samples; by default they are stacked and must have equal shapes."""
    seed: int = 0
    """Seed of transforms and of datasets that draw random numbers."""
    names: tuple[str, ...] = ()
    """Order of a batch's arrays: the model's input, which must be there, comes first; empty: as they come."""
    draws: bool = False
    """Whether transform or collate draw from global random generators, which the model uses, too: these are then seeded
    for each micro-batch by seed, epoch and its first sample, and restored."""


def grouped(numbers: Ints) -> Iterator[tuple[int, Ints]]:
    """Each distinct number with the indices at which it occurs, in ascending order."""
    order = np.argsort(numbers, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        if len(places):
            yield int(numbers[places[0]]), places


def make_batch(dataset: Dataset, recipe: Recipe, drawn: Drawn) -> Samples:
    """Read and transform the drawn samples and collate them into one batch; an empty dict if there are none.

    Raises:
        UserError: transform or collate failed, or samples to stack differ in shape or dtype; names the sample.
    """
    if not len(drawn.ids):
        return {}
    arrays = read_exclusively(dataset, drawn.ids, lambda: seeds_of(drawn, recipe.seed))
    is_ragged = any(array.dtype == object for array in arrays.values())
    if not (recipe.transform or recipe.collate or is_ragged):
        return arranged(arrays, recipe.names)
    samples: Iterable[Sample] = ({name: array[row] for name, array in arrays.items()} for row in range(len(drawn.ids)))
    return batch_of(samples, recipe, drawn)


def seeds_of(drawn: Drawn, seed: int) -> Ints:
    """Seeds for ``read_seeded``: int64, one per sample, keyed by (seed, epoch, sample, repeat)."""
    keys = zip(drawn.ids.tolist(), drawn.repeats.tolist(), strict=True)
    generators = (keyed_generator(seed, drawn.epoch, RandomStream.DATASET, *key) for key in keys)
    return np.array([generator.integers(2**63) for generator in generators], np.int64)


def batch_of(samples: Iterable[Sample], recipe: Recipe, drawn: Drawn) -> Samples:
    """One batch of samples that were already read; see ``make_batch``."""
    first, repeat = int(drawn.ids[0]), int(drawn.repeats[0])
    generator = keyed_generator(recipe.seed, drawn.epoch, RandomStream.RECIPE, first, repeat)
    with seeded(generator) if recipe.draws else nullcontext():
        return arranged(mixed(samples, recipe, drawn), recipe.names)


def mixed(samples: Iterable[Sample], recipe: Recipe, drawn: Drawn) -> Samples:
    """The samples, transformed and collated."""
    ids, giver = drawn.ids.tolist(), "the data"
    if recipe.transform is not None:
        transform = recipe.transform
        seed = recipe.seed
        giver = "the transform"
        samples = (
            transform_one(transform, sample, seed, drawn.epoch, sample_id, repeat)
            for sample, sample_id, repeat in zip(samples, ids, drawn.repeats.tolist(), strict=True)
        )
    collate = recipe.collate
    return stack(samples, ids, giver) if collate is None else collated(collate, list(samples), ids)


def arranged(batch: Samples, names: Sequence[str]) -> Samples:
    """The batch with its arrays in this order; raises UserError if it lacks the first."""
    if not names or not batch:
        return batch
    if names[0] not in batch:
        fix = f"rename one of them to {names[0]!r}, or give the task a forward, which names what the model gets"
        raise UserError(f"the model was made for {names[0]!r}, and these data have {', '.join(batch)}", fix)
    return {**{name: batch[name] for name in names if name in batch}, **batch}


def collated(collate: Collate, samples: list[Sample], ids: Sequence[int]) -> Samples:
    """Call the user's collate; raises UserError if it fails or its result is not a batch."""
    shown = f"{', '.join(map(str, ids[:4]))}{' and others' if len(ids) > 4 else ''}"

    def failed(error: Exception) -> UserError:
        held = layout({name: Field(array.shape, array.dtype) for name, array in samples[0].items()})
        fix = f"correct collate: collate(samples) gets a list of dicts of NumPy arrays, here {held}"
        return UserError(f"collate failed on samples {shown}: {with_place(error)}", fix)

    with foreign_errors(failed):
        made = collate(samples)
        if not isinstance(made, Mapping):
            raise UserError(f"collate returned {kind_of(made)}", "return a dict of arrays: one for each name")
        batch = {name: plain(array, repr(name)) for name, array in made.items()}
    for name, array in batch.items():
        if array.dtype.kind not in "biufc":
            fix = "return arrays of numbers"
            raise UserError(f"collate gives {name!r} with dtype {array.dtype} for samples {shown}", fix)
    first = next(iter(batch.values()), None)
    if first is None or first.shape[:1] != (len(ids),):
        given = layout({name: Field(array.shape, array.dtype) for name, array in batch.items()})
        fix = "return a dict whose first array has a row for each sample"
        raise UserError(f"collate gives {given} for {len(ids)} samples", fix)
    return batch


def transform_one(transform: Transform, sample: Sample, seed: int, epoch: int, sample_id: int, repeat: int) -> Sample:
    """The transformed sample; if the transform fails, raises UserError that names the sample."""
    what = f"the transform failed on sample {sample_id} in epoch {epoch}"
    with users_code(what, "correct the transform, or the sample"):
        transformed = transform(sample, keyed_generator(seed, epoch, RandomStream.TRANSFORM, sample_id, repeat))
        if transformed is None:
            raise UserError(
                f"the transform returned None for sample {sample_id}", "return the sample: a return is missing"
            )
        return named(transformed, None)


NUMBERS = frozenset({bool, int, float})


def host(value: Any) -> Any:
    """Convert torch tensors, also in mappings and tuples, to NumPy arrays on the host."""
    if isinstance(value, Mapping):
        return {name: host(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(value) if NUMBERS.issuperset(map(type, value)) else tuple(map(host, value))
    return value.numpy(force=True) if hasattr(value, "detach") else value


def named(sample: Any, names: tuple[str, ...] | None) -> Sample:
    """A sample's arrays by name: a mapping's own keys, or ``names`` for the parts of a tuple, by default x and y."""
    if isinstance(sample, Mapping):
        return {name: plain(sample[name], repr(name)) for name in names or sample}
    parts = list(sample) if isinstance(sample, (tuple, list)) else [sample]
    names = names or ("x", "y")[: len(parts)]
    if len(names) != len(parts):
        fix = "name them all: open_dataset(..., fields=(...))"
        raise UserError(f"a sample has {len(parts)} parts, for which there are {len(names)} names", fix)
    return {name: plain(part, repr(name)) for name, part in zip(names, parts, strict=True)}


def stack(
    samples: Iterable[Sample], ids: Sequence[int], giver: str, fields: Mapping[str, Field] | None = None
) -> Samples:
    """Stack the samples along a new first axis.

    Args:
        samples: one per entry of ``ids``.
        ids: the samples' numbers, for errors.
        giver: what produced the samples, for errors.
        fields: the expected fields, by default those of the first sample.

    Raises:
        UserError: a sample does not match the fields.
    """
    batch: Samples = {}
    for row, (sample_id, sample) in enumerate(zip(ids, samples, strict=True)):
        if fields is None:
            fields = {name: Field(value.shape, value.dtype) for name, value in sample.items()}
        if sample.keys() != fields.keys() or not all(field.holds(sample[name]) for name, field in fields.items()):
            given = {name: Field(value.shape, value.dtype) for name, value in sample.items()}
            raise UserError(
                f"{giver} gives {layout(given)} for sample {sample_id} where {layout(fields)} was expected",
                "make the names, shapes and dtypes of all samples equal: crop, pad or cast, or give the task a collate",
            )
        if row == 0:
            batch = {name: field.make_rows(len(ids)) for name, field in fields.items()}
        for name, value in sample.items():
            batch[name][row] = value
    return batch


def layout(fields: Mapping[str, Field]) -> str:
    """Format the fields for messages: ``image float32[3, 32, 32], label int64``."""
    return ", ".join(f"{name} {f.dtype}{list(f.shape) or ''}" for name, f in fields.items()) or "nothing"


def require_alike(fields: Sequence[Mapping[str, Field]], names: Sequence[str], fix: str) -> None:
    """Raise UserError with this fix unless all named sources have the same fields."""
    for each, name in zip(fields, names, strict=True):
        if dict(each) != dict(fields[0]):
            raise UserError(f"{name} holds {layout(each)} but {names[0]} holds {layout(fields[0])}", fix)
