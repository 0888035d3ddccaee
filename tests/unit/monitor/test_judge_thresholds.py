"""The judge's thresholds, on windows without noise whose numbers are exact in binary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hpctrain.monitor.chief.finding import Finding, FindingState, Kind
from hpctrain.monitor.chief.judge import Judge, Rule
from hpctrain.monitor.window import CAUSES, GC, Window
from hpctrain.run.grid import Grid
from hpctrain.train.clock import Phase

STEPS = 32
EXACT = Rule(slow=1 / 8, calm=1 / 16)
LEARNING = 5
"""Windows until ranks have a past: one of warm-up, four that are learned."""


def window(
    index: int, busy: Sequence[float], exchange: float = 0.25, phases: Sequence[dict[int, float]] | None = None
) -> Window:
    """Every step takes a rank ``busy`` seconds, in the forward pass if nothing else is said."""
    every = np.repeat(np.array(busy, dtype=np.float64)[:, None], STEPS, axis=1)
    typical = np.zeros((len(busy), len(CAUSES)))
    for rank, spent in enumerate(phases or [{Phase.FORWARD: seconds} for seconds in busy]):
        for column, seconds in spent.items():
            typical[rank, column] = seconds
    ranks = np.arange(len(busy))
    return Window(index, ranks, every, every.max(axis=0) - every + exchange, np.ones_like(every), typical, typical)


def watched(judge: Judge, *windows: Window) -> list[Finding]:
    return [finding for each in windows for finding in judge.judge(each)]


def judge_of(ranks: int, rule: Rule = EXACT) -> Judge:
    return Judge([f"n{rank}" for rank in range(ranks)], rule)


def told(findings: Sequence[Finding], kind: Kind) -> list[tuple[FindingState, int]]:
    """State and window of the findings of a kind."""
    return [(finding.state, finding.window) for finding in findings if finding.kind is kind]


def healthy(count: int, ranks: int, **options: float) -> list[Window]:
    return [window(index, [1.0] * ranks, **options) for index in range(count)]


@pytest.mark.parametrize(("busy", "is_slow"), [(1.125, True), (1.124, False)])
def test_a_rank_is_slow_from_the_threshold_on(busy, is_slow):
    findings = watched(judge_of(8), *(window(index, [1.0] * 7 + [busy]) for index in range(3)))
    assert told(findings, Kind.RANK) == ([(FindingState.SUSPECT, 0), (FindingState.CONFIRMED, 1)] if is_slow else [])


@pytest.mark.parametrize(("busy", "is_calm"), [(1.0625, False), (1.06, True)])
def test_a_named_rank_is_calm_below_its_threshold_for_three_windows(busy, is_calm):
    judge = judge_of(8)
    watched(judge, *(window(index, [1.0] * 7 + [1.5]) for index in range(2)))
    findings = watched(judge, *(window(index, [1.0] * 7 + [busy]) for index in range(2, 6)))
    assert told(findings, Kind.RANK) == ([(FindingState.CLEARED, 4)] if is_calm else [])


def test_a_rank_must_stand_out_from_the_spread_between_ranks():
    """It is 20% above the median, and so are others above and below: that is no more than these ranks' spread."""
    spread = [0.8, 0.85, 0.9, 1.0, 1.0, 1.1, 1.15, 1.2]
    judge = judge_of(8)
    watched(judge, window(0, spread))
    assert judge.measures is not None
    assert judge.measures.excess[-1] >= EXACT.slow and not judge.measures.slow.any()


def test_one_rank_is_measured_and_never_judged():
    judge = judge_of(1)
    assert watched(judge, *(window(index, [1.0 + index]) for index in range(8))) == []
    assert judge.measures is not None
    assert judge.measures.medians.tolist() == [8.0]
    assert not judge.measures.excess.any() and not judge.measures.cost.any() and not judge.measures.slow.any()


# Few ranks: the peer's median is no reference, so their own past has to agree


@pytest.mark.parametrize(("ranks", "is_named"), [(2, False), (3, False), (4, True)])
def test_who_is_slow_since_the_start_is_named_among_four_and_not_among_few(ranks, is_named):
    findings = watched(judge_of(ranks), *(window(index, [1.0] * (ranks - 1) + [1.5]) for index in range(9)))
    assert bool(told(findings, Kind.RANK)) is is_named
    assert bool(told(findings, Kind.UNEVEN)) is not is_named


@pytest.mark.parametrize(
    ("at_first", "later", "is_uneven"),
    [(1.25, 1.25, True), (1.05, 1.25, False), (1.25, 1.05, False), (1.05, 1.05, False)],
)
def test_few_ranks_are_uneven_if_they_differ_since_the_start_and_still_do(at_first, later, is_uneven):
    judge = judge_of(2)
    watched(judge, *(window(index, [1.0, at_first]) for index in range(LEARNING)))
    findings = watched(judge, *(window(index, [1.0, later]) for index in range(LEARNING, 8)))
    uneven = [
        finding for finding in findings if finding.kind is Kind.UNEVEN and finding.state is FindingState.CONFIRMED
    ]
    assert [finding.ranks for finding in uneven] == ([(1,)] if is_uneven else [])
    if is_uneven:
        assert uneven[0].cause == "forward", "the phase that differs"
        assert uneven[0].slowdown == pytest.approx(0.25)
        assert uneven[0].cost == pytest.approx(0.25 / 1.5), "of a step of 1.25 s and an exchange of 0.25 s"


@pytest.mark.parametrize(("busy", "is_clear"), [(1.03, True), (1.07, False)])
def test_uneven_ranks_that_become_even_are_cleared(busy, is_clear):
    judge = judge_of(2)
    watched(judge, *(window(index, [1.0, 1.25]) for index in range(8)))
    findings = watched(judge, *(window(index, [1.0, busy]) for index in range(8, 12)))
    assert told(findings, Kind.UNEVEN) == ([(FindingState.CLEARED, 10)] if is_clear else [])


def test_a_condition_that_comes_and_goes_is_confirmed_less_and_less():
    """On a busy machine, the log would fill with ranks that are uneven, then even, then uneven again."""
    judge = judge_of(2)
    watched(judge, *(window(index, [1.0, 1.25]) for index in range(LEARNING)))
    busy = [1.0, 1.0, 1.0, 1.25, 1.25] * 8
    findings = watched(judge, *(window(LEARNING + index, [1.0, one]) for index, one in enumerate(busy)))
    assert [state for state, _ in told(findings, Kind.UNEVEN)].count(FindingState.CONFIRMED) <= 1


def test_the_cause_among_few_ranks_is_what_takes_longer_than_before():
    """The other rank reads slowly and computes fast; beside it this one's computing looks worse than its reading."""
    fast = {Phase.DATA: 0.75, Phase.FORWARD: 0.25}
    judge = judge_of(2)
    before = [fast, {Phase.DATA: 0.25, Phase.FORWARD: 0.75}]
    after = [fast, {Phase.DATA: 0.75, Phase.FORWARD: 0.75}]
    watched(judge, *(window(index, [1.0, 1.0], phases=before) for index in range(LEARNING)))
    findings = watched(judge, *(window(index, [1.0, 1.5], phases=after) for index in range(LEARNING, 8)))
    assert [finding.cause for finding in findings if finding.state is FindingState.CONFIRMED] == ["data"]


def test_the_cause_among_many_ranks_is_what_takes_longer_than_with_the_others():
    """All ranks call back longer than they did; only the named one reads longer too."""
    judge = judge_of(8)
    watched(judge, *healthy(LEARNING, 8))
    common = {Phase.FORWARD: 1.0, Phase.CALLBACKS: 0.25}
    phases = [*([common] * 7), {**common, Phase.DATA: 0.25}]
    findings = watched(judge, *(window(index, [1.25] * 7 + [1.5], phases=phases) for index in range(LEARNING, 8)))
    assert [finding.cause for finding in findings if finding.kind is Kind.RANK][-1] == "data"


@pytest.mark.parametrize("ranks", [8, 2])
@pytest.mark.parametrize(("callbacks", "cause"), [(0.5, "compute"), (0.0625, "mixed")])
def test_what_is_usual_is_so_for_ranks_of_the_same_stage_or_for_the_rank_itself(ranks, callbacks, cause):
    """Forward and callbacks take longer on a rank of the last stage: all that it does, or what it hardly did too.

    The first stage reads, and has no callbacks.
    """
    judge = Judge([f"n{rank}" for rank in range(ranks)], EXACT, Grid(ranks, pipeline=2))
    first = [{Phase.DATA: 0.5, Phase.FORWARD: 0.5}] * (ranks // 2)
    last = [{Phase.FORWARD: 1 - callbacks, Phase.CALLBACKS: callbacks}] * (ranks // 2)
    slow = [*first, *last[:-1], {phase: seconds + 0.25 for phase, seconds in last[-1].items()}]
    busy = [1.0] * (ranks - 1) + [1.5]
    watched(judge, *(window(index, [1.0] * ranks, phases=[*first, *last]) for index in range(LEARNING)))
    findings = watched(judge, *(window(index, busy, phases=slow) for index in range(LEARNING, 8)))
    causes = {(finding.ranks, finding.cause) for finding in findings if finding.kind is Kind.RANK}
    assert causes == {((ranks - 1,), cause)}


# Many slow ranks


@pytest.mark.parametrize(("ranks", "slow", "are_many"), [(4, 1, False), (6, 2, False), (6, 3, True), (5, 2, True)])
def test_more_than_a_third_of_slow_ranks_are_not_singled_out(ranks, slow, are_many):
    busy = [1.0] * (ranks - slow) + [1.5] * slow
    findings = watched(judge_of(ranks), *(window(index, busy) for index in range(3)))
    assert bool(told(findings, Kind.MANY)) is are_many
    assert bool(told(findings, Kind.RANK)) is not are_many
    if are_many:
        many = findings[-1]
        assert many.ranks == tuple(range(ranks - slow, ranks))
        assert many.slowdown == pytest.approx(0.5)
        assert many.cost == pytest.approx(0.5 / 1.75)


def test_a_majority_that_was_as_fast_as_the_others_is_slow_and_one_that_was_not_is_not():
    changed, unchanged = judge_of(8), judge_of(8)
    late = [1.0] * 3 + [1.5] * 5
    watched(changed, *healthy(LEARNING, 8))
    findings = watched(changed, *(window(index, late) for index in range(LEARNING, 8)))
    assert told(findings, Kind.MANY) == [(FindingState.SUSPECT, LEARNING), (FindingState.CONFIRMED, LEARNING + 1)]
    assert findings[-1].ranks == (3, 4, 5, 6, 7)
    assert not told(watched(unchanged, *(window(index, late) for index in range(8))), Kind.MANY)


@pytest.mark.parametrize(("slow", "sizes"), [(8, [1] * 8), (9, [1] * 9), (10, [1] * 8 + [2])])
def test_the_slowest_are_told_singly_and_the_others_together(slow, sizes):
    busy = [1.0] * (32 - slow) + [1.5 + rank / 64 for rank in range(slow)]
    findings = watched(judge_of(32), *(window(index, busy) for index in range(2)))
    confirmed = [finding for finding in findings if finding.state is FindingState.CONFIRMED]
    assert [len(finding.ranks) for finding in confirmed] == sizes
    if slow > 8:
        assert confirmed[0].ranks == (31,), "the slowest first"
        assert confirmed[-1].ranks == tuple(range(32 - slow, 32 - 8))


def test_a_host_is_as_slow_as_its_ranks_are_on_average():
    """It is the least slow of nine, though its two ranks together lose more than any other."""
    judge = Judge([*(f"n{rank}" for rank in range(32)), "both", "both"], EXACT)
    findings = watched(judge, *(window(index, [1.0] * 24 + [1.6] * 8 + [1.5] * 2) for index in range(2)))
    assert [each.ranks for each in findings if each.state is FindingState.CONFIRMED][8:] == [(32, 33)]


def test_a_host_is_named_only_if_all_its_ranks_are_slow():
    for slow, kinds in ((1, {Kind.RANK}), (2, {Kind.HOST})):
        judge = Judge(["a"] * 4 + ["b"] * 2 + ["c"] * 4, EXACT)
        busy = [1.0] * 4 + [1.5] * slow + [1.0] * (6 - slow)
        assert {finding.kind for finding in watched(judge, *(window(index, busy) for index in range(2)))} == kinds


def test_many_slow_ranks_are_over_after_three_calm_windows():
    judge = judge_of(6)
    watched(judge, *(window(index, [1.0] * 3 + [1.5] * 3) for index in range(3)))
    findings = watched(judge, *(window(index, [1.0] * 6) for index in range(3, 8)))
    assert told(findings, Kind.MANY) == [(FindingState.CLEARED, 5)]
    assert (findings[-1].slowdown, findings[-1].cost) == (0, 0)


@pytest.mark.parametrize("has_past", [True, False])
def test_a_host_of_many_ranks_that_becomes_slow_is_named_and_one_that_always_was_is_not(has_past):
    """Three ranks of eight, exactly at the threshold: more than a third."""
    judge = Judge(["a"] * 5 + ["b"] * 3, EXACT)
    learned = healthy(LEARNING, 8) if has_past else []
    findings = watched(judge, *learned, *(window(index, [1.0] * 5 + [1.125] * 3) for index in range(LEARNING, 8)))
    confirmed = {(finding.kind, finding.ranks) for finding in findings if finding.state is FindingState.CONFIRMED}
    assert confirmed == {(Kind.HOST if has_past else Kind.MANY, (5, 6, 7))}


@pytest.mark.parametrize(("before", "others"), [(1.25, 1.0), (1.0, 1.08)])
def test_a_host_of_many_ranks_is_not_named_if_it_always_was_slow_or_others_are_slower_too(before, others):
    judge = Judge(["a"] * 5 + ["b"] * 3, EXACT)
    learned = [window(index, [1.0] * 5 + [before] * 3) for index in range(LEARNING)]
    findings = watched(judge, *learned, *(window(index, [others] * 5 + [1.25] * 3) for index in range(LEARNING, 8)))
    assert {finding.kind for finding in findings} == {Kind.MANY}


def test_a_rank_whose_peers_are_missing_from_a_window_accuses_nobody():
    """Of two ranks with the same part of the layers one has not sent its window."""
    judge = Judge([f"n{rank}" for rank in range(4)], EXACT, Grid(4, tensor=2))
    findings = watched(judge, *(window(index, [1.0, 1.5, 1.0]) for index in range(3)))
    assert {finding.kind for finding in findings} == {Kind.PLAN}, "it may be its part that takes longer"


# All ranks


@pytest.mark.parametrize(("slower", "is_global"), [(7, False), (8, True)])
def test_all_ranks_are_slower_if_four_of_five_are(slower, is_global):
    """The others are a little slower, below the calm threshold, so that there is no gap between two groups."""
    judge = judge_of(10)
    watched(judge, *healthy(LEARNING, 10))
    busy = [1.05] * (10 - slower) + [1.13] * slower
    findings = watched(judge, *(window(index, busy) for index in range(LEARNING, 8)))
    assert bool(told(findings, Kind.GLOBAL)) is is_global


@pytest.mark.parametrize(("busy", "is_global"), [(1.125, True), (1.12, False)])
def test_all_ranks_are_slower_from_the_threshold_on(busy, is_global):
    judge = judge_of(8)
    watched(judge, *healthy(LEARNING, 8))
    findings = watched(judge, *(window(index, [busy] * 8) for index in range(LEARNING, 8)))
    assert bool(told(findings, Kind.GLOBAL)) is is_global
    if is_global:
        assert findings[0].slowdown == pytest.approx(1 / 8) and findings[0].cost == pytest.approx(1 / 9)


@pytest.mark.parametrize(("busy", "is_clear"), [(1.0625, False), (1.06, True)])
def test_what_slowed_all_ranks_is_over_below_the_calm_threshold(busy, is_clear):
    judge = judge_of(8)
    watched(judge, *healthy(LEARNING, 8), *(window(index, [1.5] * 8) for index in range(LEARNING, 8)))
    findings = watched(judge, *(window(index, [busy] * 8) for index in range(8, 11)))
    assert told(findings, Kind.GLOBAL) == ([(FindingState.CLEARED, 10)] if is_clear else [])


@pytest.mark.parametrize(
    ("before", "after", "is_network"),
    [(0.25, 0.5, True), (0.25, 0.375, False), (1.0, 1.4, False), (1.0, 1.5, True)],
)
def test_the_exchange_is_slower_if_it_costs_something_and_takes_half_as_long_again(before, after, is_network):
    judge = judge_of(4)
    watched(judge, *healthy(LEARNING, 4, exchange=before))
    findings = watched(judge, *(window(index, [1.0] * 4, exchange=after) for index in range(LEARNING, 8)))
    assert bool(told(findings, Kind.NETWORK)) is is_network
    if is_network:
        assert findings[0].slowdown == pytest.approx(after / before - 1)
        assert findings[0].cost == pytest.approx((after - before) / (1 + after))


def test_an_exchange_that_took_no_time_at_the_start_can_become_slower():
    judge = judge_of(4)

    def taking_turns(index, exchange):
        """Every second step another rank is the last, so that each waits now and then."""
        plain = window(index, [1.0] * 4)
        busy = plain.busy.copy()
        busy[0, ::2] = busy[1:, 1::2] = 1.5
        wait = busy.max(axis=0) - busy + exchange
        return Window(index, plain.ranks, busy, wait, plain.work, plain.typical, plain.mean)

    watched(judge, *(taking_turns(index, 0.0) for index in range(LEARNING)))
    findings = watched(judge, *(taking_turns(index, 0.5) for index in range(LEARNING, 8)))
    assert told(findings, Kind.NETWORK) == [(FindingState.SUSPECT, LEARNING), (FindingState.CONFIRMED, LEARNING + 1)]
    assert findings[-1].cost == pytest.approx(0.5 / 2)


@pytest.mark.parametrize(("exchange", "is_clear"), [(1.1, True), (1.2, False)])
def test_the_exchange_is_over_if_what_is_left_is_a_small_share_of_the_step(exchange, is_clear):
    judge = judge_of(4)  # a step of 2 s: up to 1/8 s more is calm
    watched(judge, *healthy(LEARNING, 4, exchange=1.0))
    watched(judge, *(window(index, [1.0] * 4, exchange=2.0) for index in range(LEARNING, 8)))
    findings = watched(judge, *(window(index, [1.0] * 4, exchange=exchange) for index in range(8, 11)))
    assert told(findings, Kind.NETWORK) == ([(FindingState.CLEARED, 10)] if is_clear else [])


# Stages


@pytest.mark.parametrize(("longer", "is_over"), [(0.12, False), (0.05, True)])
def test_a_heavy_stage_is_over_below_half_of_what_it_must_cost(longer, is_over):
    """Of two stages one takes so much longer: equal ones would save half of that, 4.4% or 1.9% of a step."""
    judge = Judge([f"n{rank}" for rank in range(8)], EXACT, Grid(8, pipeline=2))
    heavy = watched(judge, *(window(index, [1.0] * 4 + [1.5] * 4) for index in range(3)))
    assert told(heavy, Kind.PLAN) == [(FindingState.SUSPECT, 0), (FindingState.CONFIRMED, 1)]
    findings = watched(judge, *(window(index, [1.0] * 4 + [1.0 + longer] * 4) for index in range(3, 8)))
    assert told(findings, Kind.PLAN) == ([(FindingState.CLEARED, 5)] if is_over else [])


def test_a_heavy_stage_is_told_with_what_takes_longer_there_until_nothing_is_heard_of_it():
    judge = Judge([f"n{rank}" for rank in range(8)], EXACT, Grid(8, pipeline=2))
    phases = [*([{Phase.FORWARD: 2.0}] * 4), *([{Phase.FORWARD: 2.0, Phase.DATA: 0.5}] * 4)]
    heavy = watched(judge, *(window(index, [2.0] * 4 + [2.5] * 4, phases=phases) for index in range(2)))
    assert [(finding.ranks, finding.cause) for finding in heavy] == 2 * [((4, 5, 6, 7), "data")]
    assert told(watched(judge, *(window(index, [2.0] * 4) for index in range(2, 6))), Kind.PLAN) == [
        (FindingState.CLEARED, 4)
    ]


# Pauses


def with_pause(index: int, rank: int | None, seconds: float, collects: bool = True) -> Window:
    """Four ranks that take a second a step; one of them pauses once, mostly to collect garbage if it collects."""
    plain = window(index, [1.0] * 4)
    if rank is None:
        return plain
    busy, mean = plain.busy.copy(), plain.mean.copy()
    busy[rank, 7] += seconds
    mean[rank, Phase.FORWARD if collects else Phase.DATA] += seconds / STEPS
    mean[rank, GC] += 0.75 * seconds / STEPS if collects else 0
    wait = busy.max(axis=0) - busy + 0.25
    return Window(index, plain.ranks, busy, wait, plain.work, plain.typical, mean)


@pytest.mark.parametrize(("collects", "cause"), [(True, "gc"), (False, "data")])
def test_pauses_that_go_around_are_nobodys_and_end(collects, cause):
    judge = judge_of(4)
    findings = watched(judge, *(with_pause(index, index % 4, 8.0, collects) for index in range(8)))
    assert not told(findings, Kind.PAUSES)
    assert told(findings, Kind.ROTATING) == [(FindingState.SUSPECT, 1), (FindingState.CONFIRMED, 2)]
    assert findings[-1].cause == cause
    assert findings[-1].cost == pytest.approx(8 / (STEPS * 1.25 + 8))
    after = watched(judge, *(with_pause(index, None, 0) for index in range(8, 24)))
    assert told(after, Kind.ROTATING) == [(FindingState.CLEARED, 15)], "three windows below half of what is reported"


@pytest.mark.parametrize(("seconds", "is_told"), [(5.0, True), (4.0, False)])
def test_pauses_that_go_around_are_told_from_a_tenth_of_the_time_on(seconds, is_told):
    findings = watched(judge_of(4), *(with_pause(index, index % 4, seconds) for index in range(8)))
    assert bool(told(findings, Kind.ROTATING)) is is_told


@pytest.mark.parametrize(("seconds", "is_named"), [(3.0, True), (2.0, False)])
def test_one_ranks_pauses_are_named_from_a_twentieth_of_the_time_on(seconds, is_named):
    findings = watched(judge_of(4), *(with_pause(index, 2, seconds) for index in range(20)))
    assert {finding.ranks for finding in findings if finding.kind is Kind.PAUSES} == ({(2,)} if is_named else set())
    assert not told(findings, Kind.ROTATING)


# Unequal work


def loaded(index: int, share: float, slower: float = 0.0, exchange: float = 0.25) -> Window:
    """Eight ranks, the last of which has so much more work than the others and takes as much longer, and more."""
    plain = window(index, [1.0] * 7 + [1.0 + share + slower], exchange)
    work = np.ones_like(plain.busy)
    work[-1] += share
    return Window(index, plain.ranks, plain.busy, plain.wait, work, plain.typical, plain.mean)


def test_more_work_is_told_from_the_threshold_on_and_over_once_it_is_gone():
    for share, is_told in ((0.125, True), (0.12, False)):
        findings = watched(judge_of(8), *(loaded(index, share) for index in range(3)))
        assert told(findings, Kind.IMBALANCE) == (
            [(FindingState.SUSPECT, 0), (FindingState.CONFIRMED, 1)] if is_told else []
        )
        assert not told(findings, Kind.RANK)
    judge = judge_of(8)
    findings = watched(judge, *(loaded(index, 0.5) for index in range(3)))
    assert findings[-1].ranks == (7,) and findings[-1].cost == pytest.approx(0.5 / 1.75)
    assert not told(watched(judge, *(loaded(index, 0.12) for index in range(3, 8))), Kind.IMBALANCE), "it goes on"
    findings = watched(judge, *(loaded(index, 0.0, slower=0.5) for index in range(8, 12)))
    assert told(findings, Kind.IMBALANCE) == [(FindingState.CLEARED, 10)], "though the rank is slow now"


@pytest.mark.parametrize(("slower", "is_told"), [(1 / 16, False), (1 / 32, True)])
def test_a_rank_is_loaded_if_its_work_leaves_no_excess_that_is_not_calm(slower, is_told):
    findings = watched(judge_of(8), *(loaded(index, 0.125, slower, exchange=1.0) for index in range(3)))
    assert bool(told(findings, Kind.IMBALANCE)) is is_told
    if is_told:
        assert findings[0].cost == pytest.approx(0.125 / 2.15625), "what the work takes, not what else is slower"


def test_pauses_that_no_phase_accounts_for_have_no_single_cause():
    def unaccounted(index):
        paused = with_pause(index, index % 4, 8.0)
        return Window(index, paused.ranks, paused.busy, paused.wait, paused.work, paused.typical, paused.typical)

    findings = watched(judge_of(4), *(unaccounted(index) for index in range(8)))
    assert [finding.cause for finding in findings if finding.kind is Kind.ROTATING] == ["mixed", "mixed"]


@pytest.mark.parametrize(("ranks", "is_one_host"), [(3, False), (4, True)])
def test_one_host_is_told_from_the_others_if_there_are_more_than_few_ranks(ranks, is_one_host):
    slow = np.arange(ranks) == ranks - 1
    own = np.where(slow, 1.5, 1.0)
    judge = judge_of(ranks)
    assert judge.is_one_host_that_changed(window(0, own.tolist()), slow, own) is is_one_host
