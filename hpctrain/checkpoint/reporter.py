"""Reports what happens to a run's checkpoints: as events, and in lines that the user must not miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from hpctrain.checkpoint.initial_match import SHOWN
from hpctrain.checkpoint.reading import NotUsed
from hpctrain.run import events
from hpctrain.system import foreign_text


@dataclass(frozen=True)
class Reporter:
    """Reports on rank 0, and does nothing on the other ranks."""

    is_first: bool
    """Whether this is rank 0."""
    send: Callable[[events.Event], object]
    """Called with events; does not raise."""

    def report(self, given: Iterable[events.Event | str]) -> None:
        """Print sentences, and the lines of events, which are then sent."""
        for one in given:
            if self.is_first:
                with suppress(OSError):  # the job's output may be on the full disk
                    for line in [one] if isinstance(one, str) else lines_about(one):
                        foreign_text.show(line)
                if not isinstance(one, str):
                    self.send(one)


def not_used(one: events.Rejected | NotUsed) -> str:
    """Message that says why a checkpoint was not used."""
    return f"checkpoint of step {one.step} is not used: {one.reason}"


def lines_about(event: events.Event) -> Iterator[str]:
    """Lines to print for events that the user must not miss."""
    if isinstance(event, events.CheckpointFailed):
        yield f"checkpoint of step {event.step} FAILED: {event.error}; older checkpoints are intact"
        if (event.failures or 0) > 1:
            yield f"{event.failures} CHECKPOINTS IN A ROW FAILED: what was trained since the last is not saved"
    if isinstance(event, events.Resumed):
        for rejected in event.rejected:
            yield not_used(rejected)
        yield f"resumed from step {event.step}: {event.path}{f' ({event.tier})' if event.tier else ''}"
    if isinstance(event, events.StoreAway):
        yield f"checkpoints do not reach {event.path}: {event.error}; the run folder has them"
    if isinstance(event, events.InitialWeights):
        yield f"{len(event.taken)} weights were taken from {event.path}"
        for kind, names in (("missing", event.missing), ("unexpected", event.unexpected), ("reshaped", event.reshaped)):
            if names:
                many = f"{len(names)} tensors, e.g. " if len(names) > SHOWN else ""
                yield f"{kind}: {many}{', '.join(names[:3] if many else names)}"
