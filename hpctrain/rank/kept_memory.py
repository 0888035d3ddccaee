"""Makes malloc keep freed memory on a rank whose steps spend too much time on getting fresh pages from the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic

from hpctrain.system import heap
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, Training

FIRST_STEP = 2
"""First step that is checked: earlier ones allocate memory for good, such as buffers and optimizer state."""
LOOK_S = 1.0
"""Minimum seconds between two checks."""
LOOKS = 2
"""Consecutive checks that must agree: reading a data set for the first time also takes fresh memory."""


class KeptMemory(BaseHook):
    """Makes malloc keep freed memory once the kernel spends too large a share of the step time on fresh pages.

    Does so only if the node's free memory would hold the peak use of all its ranks once more. Each rank decides for
    itself. Results do not change.

    Args:
        say: shows a message to the user; called on rank 0.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.looks = not heap.is_given(os.environ)
        self.steps = 0
        self.last: heap.Usage | None = None
        self.next_look = 0.0
        self.found = 0

    def before_fit(self, training: Training) -> None:
        """Checks only frameworks that leave memory to malloc."""
        self.looks &= training.framework.facts.gives_back

    def after_step(self, training: Training, result: StepResult) -> None:
        self.steps += 1
        if not self.looks or self.steps < FIRST_STEP or monotonic() < self.next_look:
            return
        now = heap.Usage.now()
        self.next_look = now.seconds + LOOK_S
        share = None if self.last is None else heap.kernel_share(self.last, now)
        self.last = now
        self.found = 0 if share is None else self.found + 1
        if share is not None and self.found == LOOKS:
            self.looks = False
            self.keep(training, share, now)

    def keep(self, training: Training, share: float, now: heap.Usage) -> None:
        """Keeps freed memory if there is room."""
        if heap.left_bytes() < training.world.local.size * now.peak_bytes or not heap.keep_freed():
            return
        if training.world.rank == 0:
            self.say(
                f"for {share:.0%} of the time the kernel cleared memory that steps had freed: from step "
                f"{training.state.step} on it is kept"
            )
