"""The digits task with steps of a known length, and faults on request."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from hpctrain.run.rank_environment import current_attempt
from hpctrain.tasks import torch_digits
from hpctrain.tasks.definition import TorchTask


class Slow(torch.nn.Module):
    """The network with slow training steps and a fault in one forward pass of one rank."""

    def __init__(self, network: torch.nn.Module, sleep_s: float, fault: str, rank: int, at: int) -> None:
        super().__init__()
        self.network = network
        self.sleep_s = sleep_s
        self.fault = fault if int(os.environ.get("PMIX_RANK", "-1")) == rank else ""
        self.at = at
        self.passes = 0

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            time.sleep(self.sleep_s)
            if self.passes == self.at:
                FAULTS.get(self.fault, lambda: None)()
        return self.network(image)


def exit_early() -> None:
    """Exit as if all were well."""
    os._exit(0)


def hang() -> None:
    """Wait forever, ignoring signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    time.sleep(3600)


def kill() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def eat() -> None:
    """Allocate memory until the kernel kills this process."""
    hoard = []
    while True:
        hoard.append(b"x" * 2**24)


def fail() -> None:
    """Raise an error in the user's code."""
    raise ValueError("the loss went through the roof")


def leave() -> None:
    """Call sys.exit in the user's code."""
    sys.exit(0)


FAULTS = {"exit": exit_early, "hang": hang, "kill": kill, "eat": eat, "fail": fail, "leave": leave}


def task(
    data: str,
    sleep_s: float = 0.0,
    slow_attempts: int = 1,
    fault: str = "",
    rank: int = 1,
    at: int = 20,
    once: str = "",
) -> TorchTask:
    """The digits task; steps take ``sleep_s`` longer in the first ``slow_attempts`` attempts.

    ``fault`` occurs on ``rank`` in forward pass number ``at``; only once if ``once`` names a file.
    """
    if fault and once and int(os.environ.get("PMIX_RANK", "-1")) == rank:
        if Path(once).exists():
            fault = ""
        Path(once).touch()
    made = torch_digits.task(data)
    slow = Slow(made.model, sleep_s if current_attempt() <= slow_attempts else 0.0, fault, rank, at)
    return TorchTask(
        model=slow,
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
        validation=made.validation,
        metrics=made.metrics,
    )
