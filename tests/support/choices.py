"""Reducer choices that no real run makes."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.comm.group import Group
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.reducer_choice import R, ReducerChoice, ReducerFactory


class Rehearsed(ReducerChoice):
    """Rehearses twice, although a single rank has nothing to choose from."""

    def known(self, factory: ReducerFactory[R]) -> R | None:
        """See ReducerChoice."""
        return None

    def measured(self, factory: ReducerFactory[R], rehearse: Callable[[R], object]) -> R:
        """See ReducerChoice."""
        reducer = factory.open(Candidate("none"), self.world.data)
        rehearse(reducer)
        rehearse(reducer)
        return reducer


class NoExchange(ReducerChoice):
    """Gives every rank a reducer that exchanges nothing."""

    def known(self, factory: ReducerFactory[R]) -> R:
        """See ReducerChoice."""
        return factory.open(Candidate("none"), Group("alone"))
