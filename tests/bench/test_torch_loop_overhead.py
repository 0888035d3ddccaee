"""What our step costs beside a loop written by hand: on a model so small that nothing else counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from hpctrain.comm.world import alone
from tests.support.torch_tasks import cut, global_batches, make_framework, plain_model, sgd

ALLOWED_S = 50e-6


def median_seconds(steps: list[Callable[[], object]], rounds: int = 600) -> list[float]:
    """Of each of several steps that take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, taken in zip(steps, times, strict=True):
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken[rounds // 10 :]) for taken in times]


def test_a_step_costs_less_than_50_us_more_than_by_hand() -> None:
    torch.set_num_threads(1)
    batch = next(global_batches(1))
    parts = cut(batch, 0, 1)
    framework = make_framework(alone())
    model = plain_model()
    optimizer = sgd(model)
    x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])

    def by_hand() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def ours() -> object:
        framework.set_learning_rate(0.5)
        return framework.step(parts, 30)

    hand, framework_s = median_seconds([by_hand, ours])
    print(f"by hand {hand * 1e6:.1f} us, ours {framework_s * 1e6:.1f} us")
    assert framework_s - hand < ALLOWED_S
