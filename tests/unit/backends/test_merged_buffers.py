"""What ranks judge is one model: that of an export."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from hpctrain.backends.named_state import merged_over
from hpctrain.backends.torch.state.tensors import TorchTensor
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.train.evaluation import evaluate
from hpctrain.train.saved_arrays import merge
from hpctrain.train.state import Placement
from tests.tasks.torch_tasks import make_framework, noisy_model, samples, train


class Two(Group):
    """Two ranks, of which the other one has these values, in order."""

    def __init__(self, *theirs: np.ndarray) -> None:
        super().__init__("data")
        self.size, self.theirs = 2, list(theirs)
        self.left = [value for value in theirs]

    def allgather(self, value: Any, what: str = "", timeout_s: float = 0.0) -> list[Any]:
        return [value, [zlib.crc32(one.tobytes()) for one in self.theirs]] if "statistics" in what else [value]

    def gather(self, values: np.ndarray, what: str = "", timeout_s: float = 0.0) -> np.ndarray:
        other = next(one for one in self.left if one.shape == values.shape and one.dtype == values.dtype)
        self.left = [one for one in self.left if one is not other]
        return np.stack([values, other])


def test_floats_are_averaged_counts_are_the_first_ranks_and_each_rank_gets_its_own_back():
    mean, count, same = torch.tensor([1.0, 3.0]), torch.tensor(4), torch.tensor([5.0])
    half = torch.tensor(1.0).bfloat16()
    own = (("m", mean), ("n", count), ("b", half))
    tensors = [TorchTensor(f"model/{name}", one, Placement.RANK) for name, one in own]
    tensors += [TorchTensor("model/s", same, Placement.RANK), TorchTensor("model/w", torch.ones(1))]
    three = torch.tensor(3.0).bfloat16().view(torch.uint16).numpy()
    two = Two(np.array([3.0, 9.0], np.float32), np.array(7), three, np.array([5.0], np.float32))
    with merged_over(two, tensors):
        assert mean.tolist() == [2.0, 6.0] and count == 4 and same == 5 and half == 2
        mean.add_(1)
    assert mean.tolist() == [1.0, 3.0] and count == 4 and half == 1


def test_an_evaluation_judges_the_statistics_that_an_export_has():
    framework, other, exported = (make_framework(alone(), noisy_model) for _ in range(3))
    for each, steps in ((framework, 1), (other, 2)):
        train(each, steps)
    theirs = [buffer.numpy() for buffer in other.model.buffers()]
    exported.model.load_state_dict(framework.model.state_dict())
    for buffer, value in zip(exported.model.buffers(), theirs, strict=True):
        buffer.copy_(torch.from_numpy(np.asarray(merge([buffer.numpy().copy(), value], 0, value.dtype.name))))
    sets = {"validation": [samples()]}
    first, second = (evaluate(framework, sets, Two(*theirs)), evaluate(exported, sets, Group("alone")))
    assert first.metrics == second.metrics != evaluate(framework, sets, Group("alone")).metrics
