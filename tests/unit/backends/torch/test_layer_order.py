"""What ranks that compute different layers, or call the model different numbers of times, end with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.backends.torch.strategies.fsdp.layer_order import LayerOrder
from hpctrain.errors import UserError

pytestmark = pytest.mark.slow


class Two:
    """A group of two threads."""

    def __init__(self) -> None:
        self.barrier = Barrier(2, timeout=30)
        self.values: list[Any] = [None, None]

    def of(self, rank: int) -> Any:
        """The group as this rank sees it."""
        return Seen(self, rank)


class Seen:
    def __init__(self, group: Two, rank: int) -> None:
        self.group, self.rank = group, rank

    def allgather(self, value: Any, what: str) -> list[Any]:
        self.group.values[self.rank] = value
        self.group.barrier.wait()
        found = list(self.group.values)
        self.group.barrier.wait()
        return found

    def same(self, number: int, what: str) -> bool:
        return len(set(self.allgather(number, what))) == 1


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("calls", "said"), [((1, 1), None), ((2, 2), None), ((2, 1), "a backward pass"), ((1, 3), "a backward pass")]
)
def test_ranks_call_the_model_as_often(calls, said, waits):
    """The others would wait for a gather, and this rank for a sum, until a timeout."""
    group = Two()

    def rank(number):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        order = LayerOrder(list(model), model, group.of(number), waits)
        try:
            for _ in range(2):
                order.begin_backward()
                for _ in range(calls[number]):
                    model(torch.ones(1, 2))
                order.begin_backward()
        except UserError as error:
            return error.what
        return ""

    run: Callable[[int], str] = rank
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2)))
    assert found[0] == found[1]
    assert (said in found[0]) if said else not found[0]
