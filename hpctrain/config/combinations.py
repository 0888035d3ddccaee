"""The combinations of features that are refused: a table of the rows in ``refusals``.

Features that share no row go together. Whoever knows which features a run uses calls ``refuse``: ``Config`` for the
run file, ``rank.problem`` for the task, the frameworks for what only they can see.
``python -m tests.support.docs_tables`` prints the tables of docs/combinations.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpctrain.config.features import TRAITS, Feature, Trait, Uses
from hpctrain.config.refusals import keras_tasks, plans, sums, torch_tasks, training
from hpctrain.errors import UserError


@dataclass(frozen=True)
class Row:
    """Features that cannot be combined."""

    features: tuple[Feature | Trait, ...]
    what: str
    """The sentence; {0} is what the run says of the first feature, and so on. Of a trait it is a clause about the
    feature that has it, such as ``parallel.tensor is 2``."""
    fix: str


TABLE = tuple(
    Row(features, *texts)
    for rooms in (sums, plans, training, torch_tasks, keras_tasks)
    for features, texts in rooms.ROWS.items()
)
"""Of several rows that a run breaks, the first one is reported."""


class Refused(UserError):
    """Features of a run cannot be combined."""

    def __init__(self, row: Row, what: str) -> None:
        super().__init__(what, row.fix)
        self.row = row

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.row, self.what)


def stated(feature: Feature, value: Any) -> str:
    """As a clause: ``parallel.tensor is 2``, ``reduce.overlap is on``, ``the task has a RateHook``."""
    key, _, given = feature.partition(": ")
    if not is_key(feature):
        return f"the task has {feature}"
    return f"{key} is {given or ('true' if value is True else repr(value))}"


def with_traits(uses: Uses) -> dict[Feature | Trait, Any]:
    """The features, and their traits, each with a clause about the first feature that has it."""
    found: dict[Any, Any] = {}
    for feature, own in TRAITS.items():
        if feature in uses:
            found = {**dict.fromkeys(own, stated(feature, uses[feature])), **found}
    return {**found, **uses}


def clash(uses: Uses) -> Row | None:
    """The first row of which a run uses all features."""
    everything = with_traits(uses)
    return next((row for row in TABLE if all(feature in everything for feature in row.features)), None)


def refusal(uses: Uses) -> Refused:
    """The error of features that cannot be combined."""
    row = clash(uses)
    assert row is not None, "a row of the table says so"
    everything = with_traits(uses)
    return Refused(row, row.what.format(*(everything[feature] for feature in row.features)))


def refuse(uses: Uses) -> None:
    """Raises Refused if a run uses features that cannot be combined."""
    if clash(uses) is not None:
        raise refusal(uses)


def is_key(feature: Feature) -> bool:
    """Whether a feature is one of the run file."""
    return re.fullmatch(r"[a-z_.]+\.[a-z_]+(: \w+)?", feature) is not None
