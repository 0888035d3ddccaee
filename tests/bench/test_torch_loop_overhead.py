"""Overhead of a step compared with a hand-written loop, for a model so small that overhead dominates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from hpctrain.comm.world import alone
from tests.tasks.torch_tasks import cut, global_batches, make_framework, plain_model, sgd

ALLOWED_S = 30e-6


def seconds_of(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def median_pair(first: Callable[[], object], second: Callable[[], object], rounds: int = 3000) -> tuple[float, float]:
    """Median seconds of the first of two alternating steps, and median extra seconds of the second."""
    pairs = [(seconds_of(first), seconds_of(second)) for _ in range(rounds)][rounds // 10 :]
    return statistics.median(one for one, _ in pairs), statistics.median(other - one for one, other in pairs)


def test_a_step_costs_less_than_30_us_more_than_by_hand():
    torch.set_num_threads(1)
    batch = next(global_batches(1))
    parts = cut(batch, 0, 1)
    framework = make_framework(alone())
    model = plain_model()
    optimizer = sgd(model)
    x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])

    def by_hand():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def ours():
        framework.set_learning_rate(0.5)
        return framework.step(parts, 30)

    hand_s, more_s = median_pair(by_hand, ours)
    print(f"by hand {hand_s * 1e6:.1f} us, ours {more_s * 1e6:.1f} us more")
    assert more_s < ALLOWED_S
