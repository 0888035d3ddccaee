"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.data.pipeline import Batch, BatchSource
from hpctrain.errors import Code, NoRequeue, UserError
from hpctrain.train.clock import Phase
from hpctrain.train.evaluation import evaluate
from hpctrain.train.framework import GRADIENT, SPOILED_FIX, HostBatch, NonFiniteLoss, StepResult
from hpctrain.train.hooks import Hook, StopReason, Training, first_reason
from hpctrain.train.metrics import Evaluation
from hpctrain.train.schedule import sound_factors
from hpctrain.train.state import all_finite
from hpctrain.train.stateful import value_of


@dataclass(frozen=True)
class RunSummary:
    """How an attempt ended."""

    reason: StopReason
    """Why it ended."""
    step: int
    """Updates done, including earlier attempts."""
    seconds: float
    """Wall-clock time of this attempt's loop."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation in this attempt, averaged over all validation samples; empty if there was none."""


@dataclass
class Trainer(Training):
    """Everything one rank needs to train; ``hpctrain.rank.wiring`` builds it from a run file."""

    data: BatchSource
    """This rank's part of each global batch."""
    validation: Mapping[str, Iterable[HostBatch]]
    """This rank's batches of each validation set, by the set's name."""
    hooks: Sequence[Hook]
    """Called in this order."""
    count_tokens: Callable[[HostBatch], int] | None = None
    """Counts the tokens of a micro-batch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation."""

    def fit(self) -> RunSummary:
        """Trains from the current state to the end of the plan, or until a hook stops the run. Collective.

        Returns:
            Why the loop ended, its last step, the seconds it took, and the last validation metrics.

        Raises:
            NoRequeue: the loss is not finite.
        """
        begin = time.monotonic()
        reason = first_reason([hook.before_fit(self) for hook in self.hooks]) or self.run_steps()
        self.ballot.begin()  # of the last step
        self.is_asked_to_stop = reason is StopReason.REQUESTED
        if self.is_asked_to_stop and self.plan.is_over(self.state):
            reason = StopReason.COMPLETED  # the request came at the last step
        for hook in self.hooks:
            hook.after_fit(self, reason)
        self.ballot.agreed()  # completes the last vote
        return RunSummary(reason, self.state.step, time.monotonic() - begin, self.metrics)

    def run_steps(self) -> StopReason:
        """Runs updates, evaluations and hooks until the plan is done or there is a reason to stop."""
        batches = self.data.starting_at(self.state.epoch, self.state.batch)
        while not self.plan.is_over(self.state):
            batch = next(batches)
            work = self.work(batch)
            self.ballot.begin(2 * batch.global_samples + batch.ends_epoch)
            self.clock.mark(Phase.DATA)
            result = self.update(batch)
            if self.ballot.agreed().batch < 0:
                raise self.explain_other_ends(batch)
            self.state.advance(batch)
            reason = self.evaluate() if self.plan.evaluates_after(self.state) else None
            reason = first_reason([reason, *[hook.after_step(self, result) for hook in self.hooks]])
            if batch.ends_epoch:
                reason = first_reason([reason, *[hook.after_epoch(self) for hook in self.hooks]])
            self.clock.mark(Phase.CALLBACKS)
            for hook in self.hooks:
                hook.after_hooks(self)
            self.clock.end_step(work)
            if reason is not None:
                return reason
        return StopReason.COMPLETED

    def work(self, batch: Batch) -> int:
        """This rank's tokens in a batch, which are counted; its samples if nothing says what a token is."""
        if self.count_tokens is None:
            return batch.local_samples
        tokens = sum(map(self.count_tokens, batch.micro_batches))
        self.tokens += tokens
        return tokens

    def update(self, batch: Batch) -> StepResult:
        """Sets the learning rate and trains on one batch."""
        try:
            self.framework.set_learning_rate(sound_factors(self.schedule(self.state.step), self.state.step))
            return self.framework.step(batch.micro_batches, batch.global_samples)
        except NonFiniteLoss as error:
            raise self.explain_non_finite(error, batch) from error

    def evaluate(self) -> StopReason | None:
        """Evaluates on the validation data of all ranks; returns a hook's reason to stop, if any."""
        if not self.validation:
            return None
        sets = {name: self.moving(batches) for name, batches in self.validation.items()}
        with self.framework.kept_random_state():  # how often a run evaluates must not change training
            found = evaluate(self.framework, sets, self.world.data)
        self.metrics = self.world.same(found.metrics, "agree on the metrics")
        self.evaluation = Evaluation(self.metrics, found.figures)
        return first_reason([hook.after_eval(self, self.metrics) for hook in self.hooks])

    def moving(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """Yields the batches and marks the clock after each, so that a long evaluation is not taken for a hang."""
        for batch in batches:
            yield batch
            self.clock.mark(Phase.CALLBACKS)

    def explain_non_finite(self, error: NonFiniteLoss, batch: Batch) -> NoRequeue:
        """Names the step, ranks and samples; no requeue, since a deterministic run would fail there again."""
        group, step = self.world.data, self.state.step
        samples = batch.sample_ids.tolist() if group.rank in error.ranks else None
        everywhere = group.allgather((self.spoiled(), samples), "say which batch gave a loss that is not finite")
        if spoiled := next((name for name, _ in everywhere if name), None):
            since = (
                f"the gradient of step {step} was not finite, or its update overflowed" if step else "from the start"
            )
            return NoRequeue(f"{spoiled} was not finite before step {step + 1}: {since}", SPOILED_FIX, Code.NAN)
        place = f"at step {step + 1}, epoch {batch.epoch}, batch {batch.index}"
        if error.what == GRADIENT:
            return NoRequeue(f"{GRADIENT} is not finite {place}, though the loss is", SPOILED_FIX, Code.NAN)
        culprits = [
            f"rank {self.world.rank_of(rank)}, samples {shorten(ids)}"
            for rank, (_, ids) in enumerate(everywhere)
            if ids is not None
        ]
        return NoRequeue(
            f"{error.what} is not finite {place} ({'; '.join(culprits) or 'only the sum over the ranks overflows'})",
            "look at these samples; else lower the learning rate, lengthen the warm-up, or set train.clip_norm",
            Code.NAN,
        )

    def explain_other_ends(self, batch: Batch) -> UserError:
        """Names the ranks whose stream ends in this step while that of rank 0 does not, or the reverse. Collective."""
        mine = [batch.global_samples, batch.ends_epoch]
        return other_samples(
            self.world.everyone.allgather(mine, "see whose stream ends"),
            f"{self.state.step + 1}, where the stream of some ranks ends",
        )

    def spoiled(self) -> str | None:
        """Name of a weight on this rank that is not finite."""
        for tensor in self.framework.state():
            if tensor.is_trained:
                values = value_of(tensor)
                self.framework.host.synchronize()
                if not all_finite(values, tensor.dtype):
                    return tensor.name
        return None


def other_samples(found: Sequence[object], step: object) -> UserError:
    """The error for a stream of which ranks have ``found`` different things in a step; at least two differ."""
    others = [rank for rank, each in enumerate(found) if each != found[0]]
    return UserError(
        f"the stream gave rank {', '.join(map(str, others[:8]))} other samples than rank 0 in step {step}",
        "let it yield the same samples on every rank: seed its generators equally in each epoch, and let it not "
        "depend on the rank, on worker processes or on time",
    )


def shorten(ids: Sequence[int], most: int = 8) -> str:
    """Formats at most ``most`` ids for a message."""
    return ", ".join(map(str, ids[:most])) + (f" ... ({len(ids)} in all)" if len(ids) > most else "")
