"""Shows progress to the user: a bar on a terminal, plain lines in a batch log."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from hpctrain.run.events import Eval, Event, RunFinished, RunStarted, Train
from hpctrain.system import foreign_text
from hpctrain.system.json_shape import is_number
from hpctrain.system.quantities import duration, number

PLAIN_EVERY_S = 1.0
"""Shortest time in seconds between lines of progress, so that fast steps do not flood a batch log."""


def make_console(columns: int, stream: TextIO | None = None) -> PlainConsole | BarConsole:
    """Makes the sink for a terminal of this width; 0 means no terminal."""
    stream = stream or sys.stdout
    return BarConsole(columns, stream) if columns else PlainConsole(stream)


class PlainConsole:
    """Writes one line per event, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.last_line = 0.0

    def event(self, event: Event) -> None:
        now = time.monotonic()
        is_soon = now - self.last_line < PLAIN_EVERY_S
        if isinstance(event, Train) and is_soon and event.step < (event.total_steps or 0):
            return
        if line := describe(event):
            self.last_line = now
            self.show(line)

    def show(self, line: str) -> None:
        """Prints a line; a closed pipe does not end the run."""
        try:
            foreign_text.show(line, self.stream)
        except (OSError, ValueError):
            self.stream = open("/dev/null", "w")  # noqa: SIM115 (open until the end)

    def close(self) -> None:
        """See Sink."""


class BarConsole:
    """Shows a bar with step, loss, rate and time left, and other events above it."""

    def __init__(self, columns: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=Console(file=stream, width=columns, force_terminal=True, highlight=False, markup=False),
        )
        self.bar: Any = None

    def event(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.progress.console.print(describe(event))
            total = event.total_steps or 0
            self.bar = self.progress.add_task("training", total=total, completed=event.step, status="")
            self.progress.start()
        elif isinstance(event, Train) and self.bar is not None:
            status = f"{measured(event)}  {event.rate()}"
            self.progress.update(self.bar, completed=event.step, status=status)
        elif line := describe(event):
            self.progress.console.print(line)

    def close(self) -> None:
        self.progress.stop()


def describe(event: Event) -> str:
    """Describes an event in one line; empty for events that are not shown."""
    if isinstance(event, RunStarted):
        stages = f"stages of {' + '.join(map(str, event.layers))} layers, " if event.layers else ""
        steps = f"{event.total_steps or 0} steps" + (f", from step {event.step}" if event.step else "")
        host = (
            f" through host memory (about {number(event.through_host_s)} s per update)" if event.through_host_s else ""
        )
        return f"{_who(event)}: {event.framework}, reducer {event.reducer}{host}, {stages}{steps}"
    if isinstance(event, Train):
        of = f"/{event.total_steps}" if event.total_steps else ""
        lr = f"x{number(event.lr)}" if event.learning_rate is None else number(event.learning_rate)
        return f"step {event.step}{of}  {measured(event)}  lr {lr}  {event.rate()}"
    if isinstance(event, Eval):
        metrics = "  ".join(f"{name} {number(value)}" for name, value in event.metrics.items())
        return f"step {event.step}  validation: {metrics}"
    if isinstance(event, RunFinished):
        reason = (event.reason or "ended").replace("_", " ")
        if reason == "completed" and event.steps == 0:
            return f"already completed at step {event.step}: --train.epochs N trains further, --fresh starts over"
        return f"{reason} at step {event.step}, {event.steps} steps in {duration(event.seconds or 0.0)}"
    return ""


def measured(event: Train) -> str:
    """The loss of an interval, and the task's own metrics."""
    values = {"loss": event.loss, **event.more}
    return "  ".join(f"{name} {number(value)}" for name, value in values.items() if value is None or is_number(value))


def _who(event: RunStarted) -> str:
    more = f" and {len(event.hosts) - 4} more" if len(event.hosts) > 4 else ""
    return f"{event.ranks} rank{'' if event.ranks == 1 else 's'} on {', '.join(event.hosts[:4])}{more}"
