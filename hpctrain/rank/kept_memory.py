"""A rank whose steps spend their time on fresh memory keeps what they free."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic

from hpctrain.system import heap
from hpctrain.system.heap import Usage
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook
from hpctrain.train.training import Training

FIRST_STEP = 2
"""The first step of an attempt makes what stays: buffers, and the optimizer's state."""
LOOK_S = 1.0
"""Least seconds between two looks."""
LOOKS = 2
"""That find the same in a row: a data set that is read for the first time takes fresh memory, too."""


class KeptMemory(BaseHook):
    """Lets malloc keep freed memory once the kernel takes more than a small share of the steps to hand it out again, if
    this node has room for as much again as its ranks have used at most.

    Each rank decides for itself. Nothing is computed in another way.

    Args:
        say: tells the user, on rank 0.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.looks = not heap.is_given(os.environ)
        self.steps = 0
        self.last: Usage | None = None
        self.next_look = 0.0
        self.found = 0

    def before_fit(self, training: Training) -> None:
        """Looks at frameworks only that leave it to malloc."""
        self.looks &= training.framework.gives_back

    def after_step(self, training: Training, result: StepResult) -> None:
        self.steps += 1
        if not self.looks or self.steps < FIRST_STEP or monotonic() < self.next_look:
            return
        now = Usage.now()
        self.next_look = now.seconds + LOOK_S
        share = None if self.last is None else heap.kernel_share(self.last, now)
        self.last = now
        self.found = 0 if share is None else self.found + 1
        if share is not None and self.found == LOOKS:
            self.looks = False
            self.keep(training, share, now)

    def keep(self, training: Training, share: float, now: Usage) -> None:
        """Does so if there is room."""
        if heap.left_bytes() < training.world.local.size * now.peak_bytes or not heap.keep_freed():
            return
        if training.world.rank == 0:
            self.say(
                f"for {share:.0%} of the time the kernel cleared memory that steps had given back: from step "
                f"{training.state.step} on it is kept"
            )
