"""Trains with ``hpctrain.fit`` on any number of ranks: python fit_program.py SCENARIO RUN_FILE."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import hpctrain
from hpctrain.run.events import Event


class Counter(hpctrain.BaseHook):
    """Counts samples; requests a stop at a step, if one is given."""

    def __init__(self, stop_at: int | None = None, differs: bool = False) -> None:
        self.stop_at = stop_at
        self.differs = differs
        self.seen: list[int] = []
        self.total = np.zeros(1)

    def after_step(self, training: hpctrain.Training, result: hpctrain.StepResult) -> hpctrain.StopReason | None:
        self.seen.append(training.state.samples)
        self.total += training.world.rank if self.differs else 1
        return hpctrain.StopReason.REQUESTED if training.state.step == self.stop_at else None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "total": self.total}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.seen, self.total = saved["seen"], saved["total"]


class Names:
    """Records the names of events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, event: Event) -> None:
        self.events.append(event.name)

    def close(self) -> None:
        self.events.append("closed")


def show(summary: hpctrain.RunSummary, **more: Any) -> None:
    """Print one line of JSON, on rank 0."""
    if hpctrain.connect().rank == 0:
        values = dataclasses.asdict(summary) | {"attempt_left": "HPCTRAIN_ATTEMPT" in os.environ} | more
        print("told", json.dumps(values), flush=True)


def plain(config: hpctrain.Config) -> None:
    """One run from start to end."""
    show(hpctrain.fit(config))


def twice(config: hpctrain.Config) -> None:
    """Two runs in a row."""
    for name in ("first", "second"):
        run_dir = f"{config.run_dir}-{name}"
        show(hpctrain.fit(dataclasses.replace(config, name=name, run_dir=run_dir)))
        print(f"rank speaks after {name}", file=sys.stderr, flush=True)


def in_parts(config: hpctrain.Config) -> None:
    """A run stopped by a hook and resumed, with the hook's state."""
    show(hpctrain.fit(config, hooks=[Counter(stop_at=3)]))
    counter, names = Counter(), Names()
    summary = hpctrain.fit(config, hooks=[counter], sinks=[names])
    show(summary, seen=counter.seen, total=counter.total.tolist(), events=names.events)


def differing(config: hpctrain.Config) -> None:
    """A hook whose state differs between ranks."""
    hpctrain.fit(config, hooks=[Counter(differs=True)])


def caught(config: hpctrain.Config) -> None:
    """An error that the program itself handles."""
    try:
        hpctrain.fit(config)
    except hpctrain.HpctrainError as error:
        print("caught", type(error).__name__, error.what, flush=True)


SCENARIOS: dict[str, Callable[[hpctrain.Config], None]] = {
    function.__name__: function for function in (plain, twice, in_parts, differing, caught)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](hpctrain.load_config(sys.argv[2], sys.argv[3:]))
