"""The judge on simulated ranks: the right rank, the right cause, and nobody else."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import dataclass, replace

import numpy as np
import pytest

from benchmarks.straggler import traces
from hpctrain.monitor.chief import sentence
from hpctrain.monitor.chief.finding import Finding, FindingState, Kind
from hpctrain.monitor.chief.judge import Judge
from hpctrain.monitor.window import CAUSES, GC, Window
from hpctrain.train.clock import Phase

ACCUSING = (Kind.RANK, Kind.HOST, Kind.PAUSES)
SLOW_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CALLBACKS, Phase.CHECKPOINT)


@dataclass(frozen=True)
class Outcome:
    """All confirmed and cleared verdicts of a trace."""

    verdicts: tuple[Finding, ...]

    @property
    def confirmed(self) -> list[Finding]:
        return [verdict for verdict in self.verdicts if verdict.state is FindingState.CONFIRMED]

    @property
    def accused(self) -> set[int]:
        return {rank for verdict in self.confirmed if verdict.kind in ACCUSING for rank in verdict.ranks}

    def of(self, kind: Kind, state: FindingState = FindingState.CONFIRMED) -> list[Finding]:
        return [verdict for verdict in self.verdicts if verdict.kind is kind and verdict.state is state]


def with_pauses(
    trace: traces.Trace, ranks: list[int], seconds: float, every: float, rng: np.random.Generator
) -> traces.Trace:
    """Garbage collection: each of these ranks pauses at random, on average every so many steps."""
    spent = trace.spent.copy()
    for rank in ranks:
        hit = rng.random(trace.steps) < 1 / every
        spent[rank, hit, Phase.FORWARD] += seconds
        spent[rank, hit, GC] += seconds
    return replace(trace, spent=spent)


def with_varying_work(trace: traces.Trace, rng: np.random.Generator, spread: float = 0.4) -> traces.Trace:
    """Sequences of different lengths: tokens, and with them forward and backward, vary by step and rank."""
    tokens = rng.lognormal(0, spread, trace.work.shape)
    spent = trace.spent.copy()
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        spent[:, :, phase] *= tokens
    return replace(trace, spent=spent, work=1000 * tokens)


def judged(trace: traces.Trace, hosts: list[str] | None = None, change=None) -> Outcome:  # type: ignore[no-untyped-def]
    judge = Judge(hosts or [f"n{rank}" for rank in range(trace.ranks)])
    windows = trace.windows() if change is None else (change(window) for window in trace.windows())
    return Outcome(tuple(verdict for window in windows for verdict in judge.judge(window)))


def with_step_time(window: Window) -> Window:
    """What a monitor sees that times whole steps."""
    return replace(window, busy=window.busy + window.wait)


def healthy(seed: int, ranks: int = 8, steps: int = 640, **options: float) -> traces.Trace:
    return traces.simulated(ranks, steps, np.random.default_rng(seed), **options)


@pytest.mark.parametrize("phase", SLOW_PHASES)
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_phase_is_found_with_rank_cause_and_cost(phase, seed):
    rng = np.random.default_rng(seed)
    rank, onset = int(rng.integers(8)), int(rng.integers(100, 300))
    outcome = judged(traces.slowed(healthy(seed), rank, phase, 0.2, onset))
    assert outcome.accused == {rank}
    [verdict] = outcome.of(Kind.RANK)
    assert verdict.cause == CAUSES[phase]
    assert verdict.slowdown == pytest.approx(0.2, abs=0.05)
    assert 0.04 < verdict.cost < 0.2
    assert (verdict.window + 1) * 32 - onset <= 96


@pytest.mark.parametrize("phase", SLOW_PHASES)
def test_with_step_time_in_place_of_busy_time_nothing_is_found(phase):
    """The test of the tests: the quantity that most monitors use must fail the test above."""
    outcome = judged(traces.slowed(healthy(0), 3, phase, 0.2, 200), change=with_step_time)
    assert outcome.accused == set()


def test_a_slow_processor_is_called_compute():
    outcome = judged(traces.slowed_processor(healthy(1), 5, 0.3, 200))
    assert outcome.accused == {5}
    assert outcome.confirmed[0].cause == "compute"


def test_two_culprits_of_eight_are_both_found():
    trace = traces.slowed(healthy(2), 1, Phase.DATA, 0.25, 150)
    outcome = judged(traces.slowed(trace, 6, Phase.BACKWARD, 0.2, 150))
    assert outcome.accused == {1, 6}
    assert {verdict.cause for verdict in outcome.of(Kind.RANK)} == {"data", "backward"}
    assert all(verdict.cost > 0.1 for verdict in outcome.of(Kind.RANK)[-1:]), "the joint cost, not what one alone saves"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("onset", [0, 300])
def test_one_fast_rank_accuses_nobody(ranks, onset):
    outcome = judged(traces.slowed_processor(healthy(3, ranks), ranks - 1, -0.3, onset))
    assert outcome.accused == set()


@pytest.mark.parametrize("start", [220, 223, 254, 255, 256])
@pytest.mark.parametrize("size", [1.0, 20.0])
def test_a_blip_of_three_steps_accuses_nobody(start, size):
    outcome = judged(traces.slowed(healthy(4), 2, Phase.FORWARD, size, start, end=start + 3))
    assert outcome.accused == set()


def test_rotating_collection_pauses_are_named_without_blame():
    rng = np.random.default_rng(5)
    outcome = judged(with_pauses(healthy(5, steps=1280, blips=0), list(range(8)), 0.25, 40, rng))
    assert outcome.accused == set()
    assert [verdict.cause for verdict in outcome.of(Kind.ROTATING)] == ["gc"]


def test_one_ranks_pauses_are_its_own():
    rng = np.random.default_rng(6)
    outcome = judged(with_pauses(healthy(6, steps=1280, blips=0), [4], 0.3, 12, rng))
    assert outcome.accused == {4}
    assert outcome.of(Kind.PAUSES)[0].cause == "gc"


def test_pauses_that_end_are_cleared():
    trace = traces.slowed(healthy(6, steps=2560, blips=0), 4, Phase.DATA, 0.2, 200, every=10, end=900)
    outcome = judged(trace)
    assert [(verdict.state, verdict.ranks) for verdict in outcome.verdicts if verdict.kind is Kind.PAUSES] == [
        (FindingState.SUSPECT, (4,)),
        (FindingState.CONFIRMED, (4,)),
        (FindingState.CLEARED, (4,)),
    ]


@pytest.mark.parametrize("every", [10, 100])
def test_logging_or_evaluation_on_rank_0_only_is_called_callbacks(every):
    trace = healthy(7, steps=3200, blips=0)
    outcome = judged(traces.slowed(trace, 0, Phase.CALLBACKS, 0.15, 0, every=every))
    assert outcome.accused == {0}
    assert {verdict.cause for verdict in outcome.confirmed} == {"callbacks"}


def test_checkpoints_on_one_rank_in_few_steps_are_called_checkpoint():
    outcome = judged(traces.slowed(healthy(7, steps=1600), 5, Phase.CHECKPOINT, 0.2, 200, every=8))
    assert outcome.accused == {5}
    assert outcome.confirmed[0].cause == "checkpoint"


def test_varying_work_is_called_imbalance():
    rng = np.random.default_rng(8)
    outcome = judged(with_varying_work(healthy(8, blips=0), rng))
    assert outcome.accused == set()
    assert outcome.of(Kind.IMBALANCE)


def test_a_slow_rank_among_varying_work_is_found():
    rng = np.random.default_rng(9)
    trace = with_varying_work(healthy(9, blips=0), rng)
    assert judged(traces.slowed(trace, 3, Phase.DATA, 0.4, 200)).accused == {3}


def test_a_rank_with_more_work_is_loaded_not_slow():
    trace = healthy(10)
    work, spent = 32 * trace.work, trace.spent.copy()
    work[2] *= 1.25
    spent[2] *= 1.25
    outcome = judged(replace(trace, work=work, spent=spent))
    assert outcome.accused == set()
    assert outcome.of(Kind.IMBALANCE)[0].ranks == (2,)


def test_one_more_sample_does_not_excuse_a_slow_rank():
    trace = healthy(11)
    work = 32 * trace.work
    work[2] += 1
    assert judged(traces.slowed_processor(replace(trace, work=work), 2, 0.25, 200)).accused == {2}


@pytest.mark.parametrize("phase", SLOW_PHASES)
def test_two_ranks_are_judged_by_their_past(phase):
    outcome = judged(traces.slowed(healthy(12, 2), 1, phase, 0.25, 250))
    assert outcome.accused == {1}
    assert outcome.confirmed[0].cause == CAUSES[phase]


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_ranks_that_differ_since_the_start_are_not_blamed(ranks):
    outcome = judged(traces.slowed_processor(healthy(13, ranks), 0, 0.4, 0))
    assert outcome.accused == set()
    assert outcome.of(Kind.UNEVEN)[0].ranks == (0,)


@pytest.mark.parametrize("onset", [0, 200])
def test_half_of_the_ranks_slow_is_said_so(onset):
    trace = healthy(14)
    for rank in (0, 3, 5, 6):
        trace = traces.slowed_processor(trace, rank, 0.2, onset)
    outcome = judged(trace)
    assert outcome.accused == set()
    assert outcome.of(Kind.MANY)[0].ranks == (0, 3, 5, 6)


@pytest.mark.parametrize("count", [5, 6])
def test_a_majority_that_becomes_slow_is_said_so(count):
    trace = healthy(14)
    for rank in range(count):
        trace = traces.slowed_processor(trace, rank, 0.3, 300)
    outcome = judged(trace)
    assert outcome.accused == set()
    [verdict] = outcome.of(Kind.MANY)
    assert verdict.ranks == tuple(range(count))
    assert verdict.slowdown == pytest.approx(0.3, abs=0.05)


def test_a_host_of_two_that_becomes_slow_is_named():
    trace = healthy(21)
    for rank in range(4, 8):
        trace = traces.slowed_processor(trace, rank, 0.3, 300)
    outcome = judged(trace, hosts=["n1"] * 4 + ["n2"] * 4)
    assert [(verdict.kind, verdict.hosts) for verdict in outcome.confirmed] == [(Kind.HOST, ("n2",))]


def test_two_ranks_that_pause_are_both_named():
    rng = np.random.default_rng(20)
    outcome = judged(with_pauses(healthy(20, steps=1600, blips=0), [1, 6], 0.4, 15, rng))
    assert outcome.accused == {1, 6}


def test_all_ranks_of_a_host_are_one_verdict():
    trace = healthy(15, ranks=12)
    for rank in (4, 5, 6, 7):
        trace = traces.slowed_processor(trace, rank, 0.3, 210)
    outcome = judged(trace, hosts=["n1"] * 4 + ["n2"] * 4 + ["n3"] * 4)
    assert outcome.accused == {4, 5, 6, 7}
    [verdict] = outcome.of(Kind.HOST)
    assert verdict.hosts == ("n2",)


def test_a_slower_exchange_is_the_network():
    trace = healthy(16)
    before = list(trace.windows())[:10]
    after = list(replace(trace, transfer=0.05).windows())[10:]
    judge = Judge([f"n{rank}" for rank in range(8)])
    outcome = Outcome(tuple(verdict for window in before + after for verdict in judge.judge(window)))
    assert outcome.accused == set()
    assert outcome.of(Kind.NETWORK)
    assert not outcome.of(Kind.GLOBAL)


def test_everybody_slower_is_global():
    trace = healthy(17)
    spent = trace.spent.copy()
    spent[:, 320:] *= 1.3
    outcome = judged(replace(trace, spent=spent))
    assert outcome.accused == set()
    assert [verdict.kind for verdict in outcome.confirmed] == [Kind.GLOBAL]


def stopped_now_and_then(trace: traces.Trace, rank: int, others: float) -> traces.Trace:
    """From step 200 on a rank takes 45% longer in every phase, and the others, who share its host, a little longer."""
    spent = trace.spent.copy()
    spent[:, 200:, : Phase.EXCHANGE] *= 1 + others
    spent[rank, 200:, : Phase.EXCHANGE] *= 1.45 / (1 + others)
    return replace(trace, spent=spent)


@pytest.mark.parametrize("seed", range(3))
def test_what_the_named_rank_takes_longer_is_not_everybodys(seed):
    outcome = judged(stopped_now_and_then(healthy(seed, ranks=2, steps=1000, noise=0.01), 0, 0.055))
    assert outcome.accused == {0}
    assert not outcome.of(Kind.GLOBAL) and not outcome.of(Kind.NETWORK)


def test_a_majority_that_is_slower_than_the_rest_is_not_everybody():
    trace = healthy(5, ranks=10)
    for rank in range(9):
        trace = traces.slowed_processor(trace, rank, 0.3, 200)
    outcome = judged(trace)
    assert outcome.of(Kind.MANY) and not outcome.of(Kind.GLOBAL)


def test_what_slows_all_others_too_is_told_beside_the_named_rank():
    trace = traces.slowed_processor(healthy(3, noise=0.01), 2, 0.5, 150)
    for rank in range(8):
        trace = traces.slowed_processor(trace, rank, 0.25, 400)
    outcome = judged(trace)
    assert outcome.accused == {2}
    [verdict] = outcome.of(Kind.GLOBAL)
    assert verdict.slowdown == pytest.approx(0.25, abs=0.05)
    assert sentence.of_verdict(verdict).startswith("all other ranks are 2")
    assert sentence.of_verdict(verdict).endswith("no other rank is the cause")


def large(index: int, ranks: int, slow: np.ndarray) -> Window:
    """A window of many ranks, 30% of which are slow after the baseline."""
    busy = np.random.default_rng(index).normal(0.02, 0.0002, (ranks, 32)).astype("f4")
    busy[slow] *= 1.25 if index > 6 else 1.0
    typical = np.zeros((ranks, len(CAUSES)), dtype="f4")
    typical[:, Phase.FORWARD] = np.median(busy, axis=1)
    wait = busy.max(axis=0) - busy + np.float32(0.002)
    return Window(index, np.arange(ranks), busy, wait, np.ones_like(busy), typical, typical)


def cost_of_confirming(ranks: int) -> tuple[int, int, list[Finding]]:
    """Calls and peak bytes of the window that confirms, and what it says."""
    judge = Judge([f"n{rank // 8}" for rank in range(ranks)])
    slow = np.random.default_rng(0).permutation(ranks)[: int(0.3 * ranks)]
    for index in range(8):
        judge.judge(large(index, ranks, slow))
    last, calls = large(8, ranks, slow), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    verdicts = judge.judge(last)
    sys.setprofile(None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    named = {rank for verdict in verdicts if verdict.state is FindingState.CONFIRMED for rank in verdict.ranks}
    assert named == set(slow.tolist())
    return calls, peak, verdicts


def test_a_verdict_on_a_third_of_all_ranks_grows_no_faster_than_the_ranks():
    few_calls, few_bytes, few = cost_of_confirming(1_000)
    many_calls, many_bytes, many = cost_of_confirming(10_000)
    assert many_calls <= 10 * few_calls and many_bytes <= 10.5 * few_bytes
    assert many_bytes < 32 * 2**20
    for verdicts in (few, many):
        assert len(verdicts) <= 9, "sentences are capped"
        assert max(len(sentence.of_verdict(verdict)) for verdict in verdicts) < 300


def test_recovery_clears_and_a_second_incident_fires():
    trace = traces.slowed(healthy(18, steps=1600), 3, Phase.DATA, 0.3, 200, end=500)
    outcome = judged(traces.slowed(trace, 3, Phase.FORWARD, 0.3, 1000))
    assert [
        (verdict.state, verdict.cause) for verdict in outcome.verdicts if verdict.state is not FindingState.SUSPECT
    ] == [
        (FindingState.CONFIRMED, "data"),
        (FindingState.CLEARED, ""),
        (FindingState.CONFIRMED, "forward"),
    ]


def test_ranks_that_mark_no_exchange_make_the_judge_abstain():
    trace = traces.slowed(healthy(19), 3, Phase.DATA, 0.5, 200)

    def blind(window):
        wait = window.wait.copy()
        wait[1] = 0
        return replace(window, wait=wait)

    outcome = judged(trace, change=blind)
    assert outcome.accused == set()
    assert outcome.of(Kind.ABSTAIN)[0].ranks == (1,)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_healthy_ranks_are_not_accused(ranks):
    for seed in range(4):
        assert judged(healthy(100 + seed, ranks, steps=1280)).accused == set()


@pytest.mark.slow
def test_a_hundred_thousand_healthy_rank_windows():
    accused = [judged(healthy(seed, ranks, steps=3200)).accused for ranks in (2, 4, 8, 32, 128) for seed in range(6)]
    windows = sum(100 * ranks * 6 for ranks in (2, 4, 8, 32, 128))
    assert windows > 100_000
    assert sum(map(len, accused)) <= 1
