"""Hook that writes events of training (start, interval means, evaluations, end) to the run folder and the sinks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Protocol

from hpctrain.errors import RunFailed
from hpctrain.run.attempts import versions
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import Eval, Event, RunFinished, RunStarted, Train, wall_clock
from hpctrain.run.figures import Figures, write_figures
from hpctrain.run.folder import RunDir
from hpctrain.track.sink import Sink
from hpctrain.train.clock import Phase
from hpctrain.train.evaluation import add, mean_over_ranks, results_of
from hpctrain.train.flops import Flops, of_all
from hpctrain.train.framework import StepResult, Sums
from hpctrain.train.hooks import BaseHook, StopReason, Training
from hpctrain.train.schedule import first_factor

TOKENS = "count/tokens"
"""Name of a rank's tokens among an interval's sums."""
HASTE_S = 2.0
"""Longest wait for sinks that close if someone waits for the end of the process."""


class SecondsByPhase(Protocol):
    """A clock that sums phases: IntervalClock or RingClock."""

    def take(self) -> dict[str, float]:
        """Seconds by phase name since the last call."""


class EventsHook(BaseHook):
    """Writes ``run_started``, ``train``, ``eval`` and ``run_finished``.

    Results of steps are not read until the end of an interval, since reading one may wait for a device; the ranks'
    sums are then added in one exchange. Rank 0 writes.

    Args:
        writer: writer of events.jsonl, which this hook closes.
        clock: provides the seconds of each phase.
        every_steps: length of an interval in steps.
        sinks: receive the same events; on rank 0.
        in_haste: whether someone waits for the end of the process.
    """

    def __init__(
        self,
        writer: EventWriter,
        clock: SecondsByPhase,
        every_steps: int,
        sinks: Sequence[Sink] = (),
        in_haste: Callable[[], bool] = lambda: False,
    ) -> None:
        self.writer = writer
        self.in_haste = in_haste
        self.clock = clock
        self.every_steps = every_steps
        self.sinks = sinks
        self.results: list[StepResult] = []
        self.began, self.interval_began = wall_clock(), time.monotonic()
        self.first_step = self.samples = self.tokens = 0
        self.hosts: list[str] = []
        self.has_started = False
        self.flops: Flops | None = None
        self.warned: set[str] = set()
        """Metrics already reported as not finite."""

    def before_fit(self, training: Training) -> None:
        self.hosts = sorted(set(training.world.everyone.allgather(training.world.host, "name the hosts")))
        self.clock.take()
        self.began, self.interval_began = wall_clock(), time.monotonic()
        self.first_step = training.state.step
        self.samples = training.state.samples

    def after_step(self, training: Training, result: StepResult) -> None:
        self.results.append(result)
        if not self.has_started:  # the reducer is only known after a step
            self.start(training)
        if training.state.step % self.every_steps == 0:
            self.report(training)

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> None:
        if not self.has_started:  # evaluation right after the first update: readers expect run_started first
            self.start(training)
        self.emit(training, Eval(step=training.state.step, metrics=dict(metrics), epoch=training.state.epoch))
        if training.world.rank == 0:
            self.leave_figures(training)
            self.warn_not_numbers(training, metrics)

    def leave_figures(self, training: Training) -> None:
        """Writes the evaluation's figures, replacing earlier ones."""
        figures = training.evaluation.figures
        if not figures:
            return
        path = RunDir(training.folder).figures
        try:
            write_figures(path, Figures(training.state.step, figures), training.folder)
        except RunFailed as error:
            self.writer.say(f"{error.what}; the report will lack the curves of step {training.state.step}")

    def warn_not_numbers(self, training: Training, metrics: Mapping[str, float]) -> None:
        """Reports metrics that are not finite, once each."""
        strange = [name for name, value in metrics.items() if not math.isfinite(value) and name not in self.warned]
        self.warned.update(strange)
        for name in strange:
            self.writer.say(
                f"the validation metric {name} is {metrics[name]} at step {training.state.step}: charts and events "
                "leave it out, and it is never the best\n  fix: look at the outputs and targets that it gets; "
                "AUC needs samples of both classes"
            )

    def after_fit(self, training: Training, reason: StopReason) -> None:
        if not self.has_started:
            self.start(training)
        if self.results:
            self.report(training)
        steps = training.state.step - self.first_step
        seconds = wall_clock() - self.began
        step = training.state.step
        self.emit(training, RunFinished(step=step, reason=reason.value, steps=steps, seconds=seconds))

    def close(self) -> None:
        self.writer.close()
        closing = [Thread(target=self.close_sink, args=(sink,), daemon=True) for sink in self.sinks]
        for thread in closing:
            thread.start()
        latest = time.monotonic() + HASTE_S if self.in_haste() else None
        for thread in closing:
            thread.join(None if latest is None else max(latest - time.monotonic(), 0))

    def close_sink(self, sink: Sink) -> None:
        """Closes one sink; body of a thread that does not outlive the process."""
        with suppress(OSError):
            sink.close()

    def start(self, training: Training) -> None:
        """Emits ``run_started``, dated to the start of the attempt's training."""
        self.has_started = True
        variant = training.framework.facts.reducer_name or "none"
        self.flops = flops = of_all(training.framework.facts.flops, training.world)
        event = RunStarted(
            step=self.first_step,
            time=self.began,
            ranks=training.world.size,
            hosts=tuple(self.hosts),
            tensor=training.world.tensor.size,
            pipeline=training.world.pipeline.size,
            layers=self.layers(training),
            framework=training.framework.facts.name,
            reducer=variant.partition("-")[0],
            reducer_variant=variant,
            gradient_bytes=training.framework.facts.gradient_bytes,
            through_host_s=training.framework.facts.through_host_s or None,
            flops_per_sample=flops.per_sample if flops else None,
            peak_flops_per_s=flops.peak_per_s if flops else None,
            sheet_flops_per_s=(flops.sheet_per_s or None) if flops else None,
            versions=versions(),
            total_steps=training.plan.total_steps,
        )
        self.emit(training, event)

    def layers(self, training: Training) -> tuple[int, ...]:
        """Number of layers of each pipeline stage; empty without a pipeline. Collective."""
        stages = training.world.pipeline
        return tuple(stages.allgather(training.framework.facts.num_layers, "count layers")) if stages.size > 1 else ()

    def report(self, training: Training) -> None:
        """Emits the means of the interval that ends here. Collective."""
        totals: Sums = {}
        for result in self.results:
            add(totals, result.sums())
        steps, self.results = len(self.results), []
        add(totals, {f"seconds/{phase}": (spent, 1.0) for phase, spent in self.clock.take().items()})
        state, data = training.state, training.world.data
        add(totals, {TOKENS: (float(training.tokens - self.tokens), 1.0)})
        training.clock.mark(Phase.CALLBACKS)
        means = mean_over_ranks(totals, data, "report the interval's means")
        means |= results_of(training.framework.facts.meters, training.world.everyone).metrics
        training.clock.mark(Phase.EXCHANGE)  # waiting for others is not this rank's work
        now = time.monotonic()  # the host's clock may be set during the run
        seconds_taken = max(now - self.interval_began, 1e-9)
        samples_per_s = (state.samples - self.samples) / seconds_taken
        tokens_per_s = means.pop(TOKENS) * data.size / seconds_taken
        self.samples = state.samples
        self.tokens = training.tokens
        self.interval_began = now
        timed = [name for name in means if name.startswith("seconds/")]
        seconds = {name.removeprefix("seconds/"): means.pop(name) for name in timed}
        event = Train(
            step=state.step,
            loss=means.pop("loss", float("nan")),
            grad_norm=means.pop("grad_norm", None),
            mfu=self.flops.utilisation(samples_per_s / data.size) if self.flops else None,
            lr=first_factor(training.schedule(state.step - 1)),
            learning_rate=training.framework.facts.learning_rate,
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s or None,
            seconds=seconds,
            steps=steps,
            epoch=state.epoch,
            total_steps=training.plan.total_steps,
            more=means,
        )
        self.emit(training, event)

    def emit(self, training: Training, event: Event) -> None:
        """Writes an event to events.jsonl and the sinks, on rank 0."""
        if training.world.rank != 0:
            return
        self.writer.append(event)
        for sink in self.sinks:
            with suppress(OSError):  # a full disk, a closed pipe
                sink.event(event)
