"""The vote of a step: fields that hold for all ranks, and fields that any rank can set."""

from dataclasses import replace

import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.step_vote import Ballot, SaveVote, StepVote
from tests.support.thread_groups import in_threads

READY = SaveVote(finished=True, sound=True)
IDLE = StepVote(checkpoint=READY, tiers=(READY, READY), store=READY)
"""A rank that has nothing to say."""


@pytest.mark.parametrize(
    ("second", "agreed"),
    [
        (IDLE, IDLE),
        (replace(IDLE, stop=15), replace(IDLE, stop=15)),
        (replace(IDLE, replaced=True), replace(IDLE, replaced=True)),
        (replace(IDLE, batch=5), replace(IDLE, batch=-1)),
        (replace(IDLE, store_away=True), replace(IDLE, store_away=True)),
        (replace(IDLE, checkpoint=SaveVote(due=True)), replace(IDLE, checkpoint=SaveVote(due=True))),
        (replace(IDLE, store=SaveVote(finished=True)), replace(IDLE, store=SaveVote(finished=True))),
        (replace(IDLE, tiers=(READY, SaveVote())), replace(IDLE, tiers=(READY, SaveVote()))),
    ],
)
def test_one_rank_is_enough_to_ask_and_to_hold_up(second, agreed):
    votes = [IDLE, second, replace(IDLE, stop=min(second.stop, 10))]
    assert in_threads(3, lambda group: votes[group.rank].begin(group, "vote")()) == [agreed] * 3


def test_a_vote_is_read_after_the_next_step():
    def ask(group):
        ballot, stops = Ballot(group), []
        for step in range(4):
            stops.append(ballot.agreed().stop)
            ballot.cast(stop=2 * (group.rank == step == 1))
            ballot.begin()
        return [*stops, ballot.agreed().stop]

    assert in_threads(2, ask) == [[0, 0, 2, 0, 0]] * 2


def test_nothing_is_asked_for_before_the_first_vote():
    ballot = Ballot(Group("alone"))
    assert ballot.agreed() == StepVote() == StepVote(checkpoint=SaveVote(finished=False, sound=False, due=False))
