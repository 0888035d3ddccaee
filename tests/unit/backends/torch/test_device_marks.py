"""Phases on a device whose stream waits for other ranks by itself, while the host continues."""

import pytest
import torch

from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.device import follow_device
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.train.clock import Neighbours, Phase


def test_waits_of_the_stream_count_as_exchange(monkeypatch):
    class Event:
        """Is reached when the stream, whose work the host has queued, gets there."""

        def record(self):
            self.at_ms = stream_ms

        def query(self):
            return True

        def elapsed_time(self, later):
            return float(later.at_ms - self.at_ms)

    stream_ms = 0
    monkeypatch.setattr(accelerator, "event", lambda device, timed: Event())
    monkeypatch.setattr(accelerator, "pci_address", lambda device: "")
    monkeypatch.setattr(accelerator, "memory", lambda device: (0, 0))
    clock = RingClock()
    follow_device(clock, torch.device("cpu"))
    for _ in range(2):
        stream_ms += 3  # the pass
        clock.begin_wait(Neighbours.TENSOR)
        stream_ms += 5  # the exchange
        clock.end_wait()
        stream_ms += 2
        clock.mark(Phase.FORWARD)
    clock.end_step()
    assert clock.totals[Phase.EXCHANGE] == pytest.approx(0.010)
    assert clock.totals[Phase.FORWARD] == pytest.approx(0.010)
