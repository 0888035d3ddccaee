"""One batch is copied ahead of its use: the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpctrain.backends.torch.ahead import BatchCopy, CopiesAhead, Placed


class Device:
    """Notes which copies are begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ahead = CopiesAhead(self.begin)

    def begin(self, batch: Mapping[str, Any]) -> BatchCopy:
        self.begun.append(int(batch["x"][0]))
        return BatchCopy({}, self.begun[-1])

    def load(self, number: int) -> Placed:
        return self.ahead.add(Placed(x=np.array([number])))


def test_the_next_batch_is_copied_when_the_one_before_is_taken():
    device = Device()
    batches = [device.load(number) for number in range(3)]
    assert device.begun == [0], "one at a time"
    for number, batch in enumerate(batches):
        copy = device.ahead.take(batch)
        assert copy is not None and copy.done == number
        assert device.begun == list(range(min(number + 2, 3)))


def test_a_batch_that_arrives_late_is_copied_as_soon_as_it_is_there():
    device = Device()
    device.ahead.take(device.load(0))
    late = device.load(1)
    assert device.begun == [0, 1]
    assert device.ahead.take(late) is not None


def test_a_copy_is_taken_once_since_the_task_may_change_it():
    device = Device()
    batch = device.load(0)
    assert device.ahead.take(batch) is not None
    assert device.ahead.take(batch) is None


def test_batches_that_nobody_will_use_do_not_keep_others_from_being_copied():
    device = Device()
    device.load(0)  # of an epoch that is not continued
    device.load(1)
    current = device.load(2)
    assert device.begun[-1] == 2
    assert device.ahead.take(current) is not None


def test_a_batch_that_was_used_before_its_turn_is_not_copied_later():
    device = Device()
    of_training, of_validation = device.load(0), device.load(1)
    assert device.ahead.take(of_validation) is None, "the step copies it itself"
    assert device.ahead.take(of_training) is not None
    assert device.begun == [0]
