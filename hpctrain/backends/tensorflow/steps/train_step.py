"""The program of a model with its own ``train_step``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from hpctrain.backends.tensorflow.steps.own_step import OwnStep
from hpctrain.backends.tensorflow.steps.passes import Passes, on_device
from hpctrain.backends.tensorflow.task.dry_call import try_training
from hpctrain.backends.tensorflow.task.overrides import evaluates_itself
from hpctrain.backends.update import UpdateResult, ranks_at_fault
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.framework import HostBatch, copied, samples_of


@dataclass(eq=False)
class TrainStepProgram:
    """See StepProgram."""

    task: KerasTask
    own: OwnStep
    passes: Passes
    """Of the model, for evaluations."""
    unchanged: Callable[[], contextlib.AbstractContextManager[None]]
    """A context in which passes leave no trace."""
    group: Group
    clock: StepClock
    choice: ReducerChoice
    """How the reducer is chosen."""
    example: HostBatch | None = None
    """A batch for the step of a rank without samples."""

    @property
    def reducer_name(self) -> str | None:
        return self.own.reducer_name

    @property
    def gradient_bytes(self) -> int:
        planned = self.own.updates is not None
        return self.own.gradient_bytes if planned else 4 * self.passes.travelling.pieces.layout.gradients

    def run(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        """A rank without samples takes part in the exchanges, and leaves its own state as it was."""
        own = self.own
        if self.example is None and micro_batches:
            self.example = copied(micro_batches[0])
        if self.example is None:
            what = f"a rank had no sample in its first batch ({global_samples} samples)"
            raise UserError(what, "make train.global_batch larger, or start fewer ranks")
        host = micro_batches[0] if micro_batches else self.example
        batch, samples = on_device(host), samples_of(host) if micro_batches else 0
        self.clock.mark(Phase.TO_DEVICE)
        if own.updates is None:
            own.plan(host)
        if own.reducer_name is None:
            own.open(self.choice)
        with contextlib.nullcontext() if samples else self.unchanged():
            try:
                found = own.run(batch, tf.constant(samples / global_samples, tf.float64))
                logs = {name: float(value) for name, value in found.items()} if samples else {}
            except tf.errors.OpError as error:
                if own.meeting.own_finite is None:
                    raise
                raise ranks_at_fault(self.group, own.meeting.own_finite) from error
        self.clock.mark(Phase.OPTIMIZER)
        sums = {name: (value * samples, float(samples)) for name, value in logs.items()}
        return UpdateResult(sums.get("loss") or next(iter(sums.values()), (0.0, 0.0)), None, sums)

    def dry_call(self, batch: HostBatch) -> None:
        self.example = copied(batch)
        self.own.plan(self.example)
        if self.task.validation is not None and not evaluates_itself(self.task.model):
            try_training(self.task, self.passes, on_device(copied(batch)))

    def close(self) -> None:
        self.own.close()
