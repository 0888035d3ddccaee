"""Models with a custom ``train_step``: each of their optimizers updates with gradients summed over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.backends.keras.keras_model import evaluates_itself, optimizers_in
from hpctrain.backends.tensorflow.keras_reducer import KerasReducer, KerasReducerFactory, own_errors, python_called
from hpctrain.backends.tensorflow.sparse_sums import (
    Gradients,
    rows_read_alone,
    rows_updated_alone,
    sparse_variables,
    updates_rows_alone,
)
from hpctrain.backends.tensorflow.steps.passes import (
    BatchFunction,
    KerasPasses,
    KerasStepContext,
    Tensors,
    WeightUpdate,
    on_device,
    refused_or_dense,
)
from hpctrain.backends.tensorflow.task import overrides
from hpctrain.backends.tensorflow.task.dry_call import try_training
from hpctrain.backends.update import LOSS_OR_GRADIENT, NotFinite, UpdateResult, ranks_at_fault
from hpctrain.errors import UserError
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import SQUARE
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.system.array_types import Array
from hpctrain.system.user_errors import blamed, shapes
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.framework import HostBatch, copied, samples_of
from hpctrain.train.metrics import Meter

Variables = tuple[keras.Variable, ...]


@dataclass(frozen=True)
class OwnUpdate:
    """One ``apply`` of an optimizer within a step."""

    optimizer: str
    """Path of ``by`` in the model."""
    by: keras.optimizers.Optimizer
    variables: Variables
    """The variables that have a gradient."""


@dataclass
class Tracing:
    """One trace of ``train_step``."""

    optimizers: Mapping[int, str]
    """Paths of the model's optimizers, by id."""
    graph: tf.Graph
    updates: list[OwnUpdate] = field(default_factory=list)
    done: list[tf.Tensor] = field(default_factory=list)
    """The last exchange; the next one waits for it, so that all ranks exchange in the same order."""

    def known(
        self, optimizer: keras.optimizers.Optimizer, given: Any, variables: Any
    ) -> tuple[list[Any], list[keras.Variable]]:
        """Records an ``apply``; returns its gradients and variables. Raises UserError if it cannot be exchanged."""
        if id(optimizer) not in self.optimizers:
            raise UserError(
                f"train_step applies gradients by the {type(optimizer).__name__} {optimizer.name!r}, which is not an "
                "attribute of the model, so that its state would not be saved",
                "keep the optimizer as an attribute of the model (self.d_optimizer), set in __init__ or compile",
            )
        name = self.optimizers[id(optimizer)]
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise UserError(
                f"train_step applies gradients by {name} inside tf.cond or tf.while_loop, which ranks may skip",
                "apply them in every step, or in a Python loop; multiply gradients by 0 where nothing is to change",
            )
        variables = list(optimizer._trainable_variables if variables is None else variables)
        gradients = list(given)
        present = [one for gradient, one in zip(gradients, variables, strict=True) if gradient is not None]
        if not present:
            raise UserError(
                f"train_step gives {name} no gradient at all: what it differentiates does not depend on the weights",
                "compute the loss inside tf.GradientTape, by operations that have gradients, unlike argmax",
            )
        self.updates.append(OwnUpdate(name, optimizer, tuple(present)))
        return gradients, variables


def new_tracing(task: KerasTask) -> Tracing:
    """Starts a record of the TensorFlow function that is being traced."""
    optimizers = {id(one): path or "optimizer" for path, one in optimizers_in(task.optimizer).items()}
    return Tracing(optimizers, tf.compat.v1.get_default_graph())


def planned(task: KerasTask, batch: Mapping[str, tf.TensorSpec]) -> list[OwnUpdate]:
    """Traces ``train_step`` to find what it updates, in order; computes nothing.

    Builds optimizers and layers that are not built. Not collective.

    Args:
        task: the task, with the optimizers of its model.
        batch: specs of a batch.

    Raises:
        UserError: the step fails, or its gradients cannot be exchanged.
    """
    tracings: list[Tracing] = []

    def call(tensors: Tensors) -> None:
        tracing = new_tracing(task)
        tracings.append(tracing)

        def note(optimizer: keras.optimizers.Optimizer, apply: overrides.Apply, gradients: Any, variables: Any) -> None:
            _, variables = tracing.known(optimizer, gradients, variables)
            if not optimizer.built:
                with tf.init_scope(), keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(variables)

        task.model.reset_metrics()
        fix = f"train_step(self, data) gets what fit_data makes of a dict of {shapes(batch)}: by default these in order"
        with blamed("train_step of the model", fix), overrides.intercepted(note):
            logs = task.model.train_step(task.fit_data(dict(tensors)))
        overrides.scalars(logs, "train_step")
        if not tracing.updates:
            raise UserError(
                "train_step of the model applies no gradients by an optimizer",
                "call self.optimizer.apply_gradients(zip(gradients, self.trainable_weights)) in it",
            )

    tf.function(call, autograph=False).get_concrete_function(dict(batch))
    return tracings[-1].updates


def build_by_own_step(task: KerasTask, samples: Mapping[str, Array]) -> None:
    """Builds the weights and optimizers of a model with a custom ``train_step``; computes nothing."""
    planned(task, {name: tf.TensorSpec((None, *one.shape[1:]), one.dtype) for name, one in specs(samples).items()})


def try_own_step(task: KerasTask, batch: Mapping[str, Array]) -> list[OwnUpdate]:
    """Returns what ``train_step`` updates. Raises UserError if it, or ``test_step`` if used, fails on a batch."""
    updates = planned(task, specs(batch))
    if task.validation is not None and evaluates_itself(task.model):
        fix = f"test_step(self, data) gets what fit_data makes of a dict of {shapes(batch)}: by default these in order"

        def call(tensors: Tensors) -> None:
            with blamed("test_step of the model", fix):
                overrides.tested(task, tensors)

        tf.function(call, autograph=False).get_concrete_function(specs(batch))
    return updates


def specs(batch: Mapping[str, Array]) -> dict[str, tf.TensorSpec]:
    """Specs of arrays."""
    return {name: tf.TensorSpec(array.shape, tf.as_dtype(array.dtype)) for name, array in batch.items()}


class ExchangeCalls:
    """Host callbacks of a step's exchanges."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.own_finite: bool | None = None
        """Whether this rank's gradients were finite when NotFinite ended the step; None if it did not."""

    def arrive(self) -> None:
        """This rank's gradients are complete."""
        self.own_finite = None
        self.clock.mark(Phase.BACKWARD)

    def leave(self) -> None:
        """The sums are complete."""
        self.clock.mark(Phase.EXCHANGE)

    def stop(self, own: Array) -> np.bool_:
        """Ends the step because sums are not finite. ``own`` is finite if this rank's gradients are."""
        self.own_finite = bool(np.isfinite(own))
        raise NotFinite


@dataclass(eq=False)
class TrainStepProgram:
    """Runs a custom ``train_step``, traced once, with an exchange at each optimizer ``apply``."""

    context: KerasStepContext
    """The task's ``optimizer`` holds the model's optimizers, by path."""
    passes: KerasPasses
    """Passes of the model, for evaluations."""
    weight_update: WeightUpdate
    unchanged: Callable[[], contextlib.AbstractContextManager[None]]
    """A context in which passes leave no trace."""
    example: HostBatch | None = None
    """A batch used on a rank without samples."""
    updates: list[OwnUpdate] | None = None
    """Updates of one step, once planned."""
    packing: dict[Any, Gradients] = field(default_factory=dict)
    reducers: dict[Any, KerasReducer] = field(default_factory=dict)
    """Both by the variables whose gradients are exchanged together (``key``)."""
    meters: Mapping[str, Meter] = field(default_factory=dict)
    """None: what ``train_step`` returns is reported."""

    def __post_init__(self) -> None:
        self.task, self.group, self.clock = self.context.task, self.context.world.data, self.context.clock
        self.meeting = ExchangeCalls(self.clock)
        self.step = BatchFunction(self._step, compiled=False)
        """step(batch, share) -> {name: scalar}; ``share`` is this rank's fraction of the global batch."""

    @own_errors()
    def run(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        """A rank without samples takes part in the exchanges but keeps its per-rank state."""
        if self.example is None and micro_batches:
            self.example = copied(micro_batches[0])
        if self.example is None:
            what = f"a rank had no sample in its first batch ({global_samples} samples)"
            raise UserError(what, "make train.global_batch larger, or start fewer ranks")
        host = micro_batches[0] if micro_batches else self.example
        batch = on_device(host)
        samples = samples_of(host) if micro_batches else 0
        self.clock.mark(Phase.TO_DEVICE)
        if self.updates is None:
            self.plan(host)
        if self.reducer_name is None:
            self.open(self.context.choice)
        with contextlib.nullcontext() if samples else self.unchanged():
            try:
                found = self.step(batch, tf.constant(samples / global_samples, tf.float64))
                logs = {name: float(value) for name, value in found.items()} if samples else {}
            except tf.errors.OpError as error:
                if self.meeting.own_finite is None:
                    raise
                raise ranks_at_fault(NotFinite(), self.group, self.meeting.own_finite, LOSS_OR_GRADIENT) from error
        self.clock.mark(Phase.OPTIMIZER)
        sums = {name: (value * samples, float(samples)) for name, value in logs.items()}
        return UpdateResult({"loss": next(iter(sums.values()), (0.0, 0.0)), **sums})

    def dry_call(self, batch: HostBatch) -> None:
        self.example = copied(batch)
        self.plan(self.example)
        if self.task.validation is not None and not evaluates_itself(self.task.model):
            try_training(self.task, self.passes, on_device(copied(batch)))

    def plan(self, batch: Mapping[str, Array]) -> None:
        """Tries a step on a batch and records what it updates; see ``try_own_step``."""
        self.updates = try_own_step(self.task, batch)

    def open(self, choice: ReducerChoice) -> None:
        """Opens the reducers of a planned step. Collective.

        Raises:
            UserError: the ranks' steps make different updates.
        """
        updates = self.updates or []
        described = [(one.optimizer, [variable.path for variable in one.variables]) for one in updates]
        everywhere = self.group.allgather(described, "compare what their train_step updates")
        odd = [rank for rank, each in enumerate(everywhere) if each != everywhere[0]]
        if odd:
            raise UserError(
                f"train_step of rank {odd[0]} updates other weights than that of rank 0, or in another order",
                "make the same updates on every rank: only data may depend on the rank",
            )
        self.packing = {key(one.variables): self._packing(one) for one in updates}
        largest, *others = sorted(self.packing, key=lambda each: -self.packing[each].pieces.layout.gradients)
        reducers = {each: KerasReducerFactory(gradients.pieces) for each, gradients in self.packing.items()}
        zeros = self.packing[largest].pieces.zeros()
        first = choice.reducer(reducers[largest], lambda reducer: np.asarray(reducer.sum(zeros)[-1]))
        self.reducers = {largest: first}
        for each in others:
            self.reducers[each] = reducers[each].open(Candidate.parse(first.name), self.group)

    def _packing(self, update: OwnUpdate) -> Gradients:
        """Makes the packer of an update's gradients. Collective."""
        sparse = sparse_variables(update.variables, self.task.model, update.by, self.context.config, self.group.size)
        return Gradients(update.variables, sparse, self.group)

    def _tables_by_rows(self) -> list[keras.Variable]:
        """Tables that an optimizer updates by rows."""
        by_rows = [one for one in self.updates or [] if updates_rows_alone(one.by)]
        return [table for one in by_rows for table in self.packing[key(one.variables)].rows_of]

    def close(self) -> None:
        while self.reducers:
            self.reducers.popitem()[1].close()
        while self.packing:
            self.packing.popitem()[1].close()

    @property
    def reducer_name(self) -> str | None:
        return next((reducer.name for reducer in self.reducers.values()), None)

    @property
    def gradient_bytes(self) -> int:
        if self.updates is None:
            return 4 * self.passes.packing.pieces.layout.gradients
        known = [self.packing[key(one.variables)] for one in self.updates if self.packing]
        return 4 * sum(one.pieces.layout.gradients for one in known)

    def _step(self, batch: Tensors, share: tf.Tensor) -> dict[str, tf.Tensor]:
        tracing = new_tracing(self.task)

        def exchange(
            optimizer: keras.optimizers.Optimizer, apply: overrides.Apply, gradients: Any, variables: Any
        ) -> None:
            gradients, variables = tracing.known(optimizer, gradients, variables)
            self.weight_update.apply(apply, self._summed(tracing, share, optimizer, gradients, variables), variables)

        model = self.task.model
        model.reset_metrics()
        with overrides.intercepted(exchange), rows_read_alone(self._tables_by_rows()), rows_updated_alone():
            logs = overrides.scalars(model.train_step(self.task.fit_data(dict(batch))), "train_step")
        self.weight_update.follow(model.trainable_variables)
        return logs

    def _summed(
        self,
        tracing: Tracing,
        share: tf.Tensor,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        """Turns means over this rank's samples into means over the global batch."""
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        known = key(tuple(variables[index] for index in present))
        if known not in self.reducers:
            raise UserError(
                f"train_step updates other weights by {tracing.updates[-1].optimizer} than when it was first traced",
                "make the same updates in every step",
            )
        packing, reducer = self.packing[known], self.reducers[known]
        given = [gradients[each] for each in present]
        sparse = self.context.config.reduce.sparse
        ready = refused_or_dense(packing, [variables[each] for each in present], given, sparse)
        rows, pieces = packing.apart(packing.pack_with(ready, {}))
        part = tf.cast(share, packing.pieces.dtype)
        rows = packing.tables.scaled(rows, part)
        *mine, slots = [tf.math.multiply_no_nan(piece, part) for piece in pieces]  # zeros on a rank without samples
        meeting = self.meeting
        leave = self.meeting.leave if reducer.has_peers else None
        with tf.control_dependencies([*mine, *rows, *tracing.done]):
            slots = tf.identity(slots)
            *sums, slots = reducer.sum([*mine, slots], meeting.arrive, None if rows else leave)
        own_rows = rows
        if rows:
            with tf.control_dependencies([*sums, slots]):  # all ranks exchange in this order
                rows = packing.tables.sum([tf.identity(tensor) for tensor in rows], leave)
        square = slots[SQUARE] + tf.cast(packing.tables.square(rows), slots.dtype)

        def stop() -> tf.Tensor:
            norms = [tf.cast(tf.nn.l2_loss(one), slots.dtype) for one in (*mine, *own_rows[1::2])]
            return python_called(meeting.stop, [tf.add_n(norms)], tf.bool)

        with tf.control_dependencies([*sums, *rows]):
            tracing.done = [tf.cond(tf.math.is_finite(square), lambda: tf.constant(True), stop)]
        with tf.control_dependencies(tracing.done):
            sums, rows = [tf.identity(total) for total in sums], [tf.identity(tensor) for tensor in rows]
        found: list[Any] = [None] * len(variables)
        totals = packing.unpack(rows, sums, updates_rows_alone(optimizer))
        for each, total in zip(present, totals, strict=True):
            found[each] = total
        return found


def key(variables: Sequence[keras.Variable]) -> tuple[int, ...]:
    """Key of variables whose gradients are exchanged together."""
    return tuple(id(variable) for variable in variables)
