"""Reducer choices that no real run makes."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.comm.group import Group
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.reducer_choice import R, ReducerChoice, Reducers


class Rehearsed(ReducerChoice):
    """Rehearses twice, although a single rank has nothing to choose from."""

    def known(self, reducers: Reducers[R]) -> R | None:
        """See ReducerChoice."""
        return None

    def measured(self, reducers: Reducers[R], rehearse: Callable[[R], object]) -> R:
        """See ReducerChoice."""
        reducer = reducers.open(Candidate("none"), self.world.data)
        rehearse(reducer)
        rehearse(reducer)
        return reducer


class NoExchange(ReducerChoice):
    """Gives every rank a reducer that exchanges nothing."""

    def known(self, reducers: Reducers[R]) -> R:
        """See ReducerChoice."""
        return reducers.open(Candidate("none"), Group("alone"))
