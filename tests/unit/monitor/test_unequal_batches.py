"""Batches of unequal length: ranks take turns at holding up the others, and nobody is slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.straggler import traces
from hpctrain.monitor.chief import sentence
from hpctrain.monitor.chief.finding import Finding, FindingState, Kind
from hpctrain.monitor.chief.judge import Judge
from hpctrain.monitor.window import GC
from hpctrain.train.clock import Phase

COMPUTING = [Phase.FORWARD, Phase.BACKWARD]


def confirmed(trace: traces.Trace, steps: int = 32) -> list[Finding]:
    judge = Judge([f"n{rank}" for rank in range(trace.ranks)])
    findings = [finding for window in trace.windows(steps) for finding in judge.judge(window)]
    return [finding for finding in findings if finding.state is FindingState.CONFIRMED]


def even(seed: int, ranks: int = 8, steps: int = 640, noise: float = 0.05) -> traces.Trace:
    return traces.simulated(ranks, steps, np.random.default_rng(seed), noise=noise, blips=0.0)


def with_lengths(trace: traces.Trace, seed: int, sigma: float, power: float, tokens: bool = False) -> traces.Trace:
    """Log-normal lengths; forward and backward take time in proportion to a power of them."""
    lengths = np.random.default_rng([seed, 1]).lognormal(0, sigma, trace.work.shape)
    spent = trace.spent.copy()
    spent[:, :, COMPUTING] *= lengths[:, :, None] ** power
    return replace(trace, spent=spent, work=1000 * lengths if tokens else trace.work)


def seconds(trace: traces.Trace) -> float:
    return float(trace.busy().max(axis=0).sum() + trace.steps * trace.transfer)


def saved_by_bucketing(trace: traces.Trace, seed: int, sigma: float, power: float) -> float:
    """Fraction of the time saved if in each step the same work is spread equally over the ranks."""
    work = np.random.default_rng([seed, 1]).lognormal(0, sigma, trace.work.shape) ** power
    spent = trace.spent.copy()
    spent[:, :, COMPUTING] *= work.mean(axis=0)[None, :, None]
    return 1 - seconds(replace(trace, spent=spent)) / seconds(with_lengths(trace, seed, sigma, power))


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_even_batches_with_noise_of_a_tenth_are_silent(ranks, seed):
    assert Kind.IMBALANCE not in {finding.kind for finding in confirmed(even(seed, ranks, noise=0.1))}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_slow_rank_does_not_make_batches_unequal(ranks):
    findings = confirmed(traces.slowed_processor(even(1, ranks), 1, 0.5, 200))
    assert [(finding.kind, finding.ranks) for finding in findings] == [(Kind.RANK, (1,))]


@pytest.mark.parametrize("ranks", [4, 8, 32])
@pytest.mark.parametrize(("sigma", "power"), [(0.5, 1.0), (0.4, 2.0)])
def test_lengths_are_one_finding_without_blame(ranks, sigma, power):
    [finding] = confirmed(with_lengths(even(2, ranks), 2, sigma, power))
    assert (finding.kind, finding.ranks, finding.power) == (Kind.IMBALANCE, (), None)


def test_short_steps_are_not_taken_for_unequal_batches():
    """Steps of milliseconds differ as much by what the operating system does."""
    lengths = with_lengths(even(2), 2, 0.5, 1.0)
    scale = 0.01 / (seconds(lengths) / lengths.steps)
    short = replace(lengths, spent=lengths.spent * scale, transfer=lengths.transfer * scale)
    assert [Kind.IMBALANCE in {one.kind for one in confirmed(trace)} for trace in (lengths, short)] == [True, False]


@pytest.mark.parametrize("noise", [0.02, 0.05])
@pytest.mark.parametrize(("sigma", "power"), [(0.5, 1.0), (0.4, 2.0)])
@pytest.mark.parametrize("tokens", [False, True])
def test_the_cost_is_what_bucketing_saves(noise, sigma, power, tokens):
    trace = even(3, steps=1024, noise=noise)
    [finding] = confirmed(with_lengths(trace, 3, sigma, power, tokens), steps=512)  # a window of 32 varies by 10%
    assert finding.cost == pytest.approx(saved_by_bucketing(trace, 3, sigma, power), rel=0.1)
    step = seconds(with_lengths(trace, 3, sigma, power)) / trace.steps
    assert finding.step_s == pytest.approx(finding.cost * step, rel=0.1)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0, 3.0])
def test_reported_tokens_show_with_which_power_time_grows(power):
    [finding] = confirmed(with_lengths(even(4), 4, 0.4, power, tokens=True))
    assert (finding.kind, finding.power) == (Kind.IMBALANCE, power)
    assert f"time grows roughly as work^{power:g}" in sentence.of_verdict(finding)


def test_the_sentence_says_what_to_do():
    trace = with_lengths(even(5), 5, 0.5, 1.0)
    unknown, other = trace, replace(trace, work=np.random.default_rng(5).uniform(1, 3, trace.work.shape))
    for each, ending in (
        (unknown, "report tokens as work to confirm it"),
        (other, "reported work does not explain it"),
    ):
        [finding] = confirmed(each)
        text = sentence.of_verdict(finding)
        assert "LengthGroupedSampler" in text and text.endswith(ending)
        assert f"{finding.cost:.0%} of the time ({finding.step_s:.2g} s per step)" in text


@pytest.mark.parametrize("every", [40, 15])
@pytest.mark.parametrize("ranks", [2, 8])
def test_garbage_collection_on_random_ranks_is_named_as_such(ranks, every):
    trace = even(6, ranks, steps=1280)
    hit = np.random.default_rng(6).random(trace.work.shape) < 1 / every
    spent = trace.spent.copy()
    spent[:, :, [Phase.FORWARD, GC]] += 0.25 * hit[:, :, None]
    assert {(finding.kind, finding.cause) for finding in confirmed(replace(trace, spent=spent))} == {
        (Kind.ROTATING, "gc")
    }


def test_steps_that_are_long_on_all_ranks_alike_cost_nothing():
    trace = even(7)
    spent = trace.spent * np.random.default_rng(7).lognormal(0, 0.4, trace.steps)[None, :, None]
    assert Kind.IMBALANCE not in {finding.kind for finding in confirmed(replace(trace, spent=spent))}
