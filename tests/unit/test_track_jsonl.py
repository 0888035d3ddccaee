"""Events of training: what sinks get is what is in the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpctrain.event_writer import EventWriter
from hpctrain.events import decode
from hpctrain.track.jsonl import EventsHook
from hpctrain.train.clock import IntervalClock


class Recorder:
    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_sinks_get_the_event_that_is_in_the_file(tmp_path: Path) -> None:
    path, sink = tmp_path / "events.jsonl", Recorder()
    state = SimpleNamespace(step=4, epoch=1)
    trainer: Any = SimpleNamespace(world=SimpleNamespace(rank=0), state=state)
    hook = EventsHook(EventWriter(path, print), IntervalClock(), 1, [sink])
    hook.has_started = True
    hook.after_eval(trainer, {"accuracy": 0.5})
    assert sink.events == decode(path.read_bytes())
    assert sink.events[0]["metrics"] == {"accuracy": 0.5}
