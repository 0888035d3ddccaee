"""What the user's task function returns: a model, how to judge it, and the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpctrain.errors import UserError
from hpctrain.parallel.tensor_words import LayerCut
from hpctrain.tasks.meters import is_stateful
from hpctrain.train.hooks import Hook
from hpctrain.train.stateful import HOOKS, Kept, PerRank, Stateful, kept_state

Score = Any
"""A scalar tensor, the mean over the batch's samples; or two, (sum, weight), if samples weigh differently."""


def first_field(model: Any, batch: Mapping[str, Any]) -> Any:
    """The model applied to the first array of the batch."""
    if isinstance(model, Mapping):
        names = ", ".join(map(repr, model))
        fix = "say what is evaluated or predicted: forward=lambda models, batch: models[...](batch[...])"
        raise UserError(f"the task has several models ({names}) and no forward", fix)
    return model(next(iter(batch.values())))


def in_order(batch: Mapping[str, Any]) -> Any:
    """The arrays of a batch, as ``fit`` packs them: one by itself, several as a tuple."""
    arrays = tuple(batch.values())
    return arrays if len(arrays) > 1 else arrays[0]


@dataclass(frozen=True)
class TorchScheduler:
    """A scheduler of ``torch.optim.lr_scheduler``, for ``TorchTask(schedule=...)``. Its state is saved with the run."""

    make: Callable[[Any], Any]
    """make(optimizer) returns the scheduler; called with the task's optimizer before training."""
    every: Literal["step", "epoch", "evaluation"] = "step"
    """When its ``step`` is called: after each update, each epoch, or each evaluation."""
    metric: str = "loss"
    """Validation metric that ReduceLROnPlateau gets; it is stepped every evaluation."""


@dataclass(frozen=True)
class Task:
    """One learning problem. Use TorchTask or KerasTask."""

    model: Any
    """torch.nn.Module, or keras.Model on the TensorFlow backend. With a custom step also a dict of modules."""
    loss: Any = None
    """loss(outputs, batch): mean over the samples, or (sum, weight). Or a name such as "mse", or one of the framework's
    own losses, if samples hold two arrays: the second one is the target. A task with a custom step needs none."""
    optimizer: Any = None
    """torch.optim.Optimizer over the model's parameters, or a list of several that follow the same loss; or
    keras.optimizers.Optimizer. With a custom step also a dict of them. No two share a parameter."""
    train: Any = None
    """Training data: a dict of NumPy arrays with a leading sample axis, an HDF5 path, an hpctrain dataset, a torch
    Dataset, a tf.data.Dataset, or a function that returns one of these. TorchTask: or a DataLoader, whose dataset,
    order and collate_fn are taken."""
    validation: Any = None
    """Validation data, likewise; or several sets by name: {"dev": ..., "hard": ...}. Metrics of the first set have
    plain names (``loss``), those of others ``hard/loss``."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Validation metrics by name: a function metric(outputs, batch) returning what loss may return; a metric of
    torchmetrics or Keras; or a ``Metric``. All but functions get the output and the second of a batch's two arrays, or
    what a ``Selected`` picks."""
    forward: Callable[[Any, Any], Any] = first_field
    """forward(model, batch) gives the outputs; by default the model applied to the batch's first array."""
    transform: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None
    """transform(sample, rng) of one training sample (dict of NumPy arrays); rng is a NumPy Generator keyed by (seed,
    epoch, sample). With data.workers it must be importable: a top-level function, or a functools.partial of one."""
    schedule: Callable[[int], float | Sequence[float]] | TorchScheduler | None = None
    """Learning rate, if the run file has no schedule: schedule(step) is the factor on the optimizer's own rate for
    the update after ``step`` done ones, or a sequence of one for each of its parameter groups; or a TorchScheduler."""
    collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None
    """collate(samples) makes one micro-batch of a list of samples (dicts of NumPy arrays), for training and for
    validation: a dict of arrays, the first of which has a row for each sample. By default samples are stacked, and must
    be equal in shape. ``hpctrain.pad`` is one for samples of variable length. Importable, as transform is."""
    sampler: Callable[[Any], Any] | None = None
    """sampler(epoch) names the training samples of an epoch in order, in place of data.shuffle: int64[n], with the same
    n in all epochs. ``epoch`` is an ``hpctrain.Epoch``; WeightedSampler and others are ready-made."""
    hooks: Sequence[Hook] = ()
    """Attached to the training loop behind hpctrain's own; their state is part of checkpoints."""
    state: Mapping[str, Stateful | PerRank] = field(default_factory=dict)
    """Other objects whose state is part of checkpoints, by name: each has ``state_dict`` and ``load_state_dict``. Rank
    0's is saved, and all ranks take it over; ``PerRank(object)`` is each rank's own."""

    @property
    def mean_metrics(self) -> dict[str, Callable[[Any, Any], Score]]:
        """Those of the metrics that are functions."""
        return {name: metric for name, metric in self.metrics.items() if not is_stateful(metric)}


@dataclass(frozen=True)
class TorchTask(Task):
    """A task whose model is a torch.nn.Module, or several by name."""

    step: Callable[[Any, dict[str, Any]], Mapping[str, Any] | None] | None = None
    """step(ctx, batch) does what one global batch is there for, by ``ctx.backward`` and ``ctx.update``; see
    ``hpctrain.StepContext``. It may return metrics by name."""
    tensor: Mapping[str, LayerCut] = field(default_factory=dict)
    """How layers are cut over ``parallel.tensor`` ranks: ``hpctrain.columns``, ``hpctrain.rows`` or
    ``hpctrain.vocabulary`` by patterns of their names, such as ``{"blocks.*.up": columns, "blocks.*.down": rows}``;
    and which tables ``parallel.shard: tables`` partitions: those with ``vocabulary``."""
    layers: Callable[[Any], Sequence[Callable[[Any], Any]] | Sequence[Sequence[Callable[[Any], Any]]]] | None = None
    """layers(model) lists what the model applies one after the other, if ``parallel.pipeline`` stages share it out:
    ``lambda model: [model.embed, *model.blocks, model.head]``. A function among them gets the modules whose parameters
    it uses by ``functools.partial``. Stages then take equally long; or it returns a list of layers for each stage. An
    ``nn.Sequential`` needs none."""


@dataclass(frozen=True)
class KerasTask(Task):
    """A task whose model is a Keras 3 model on the TensorFlow backend.

    A compiled model brings its loss, metrics and optimizer along, and one with its own ``train_step`` is trained by it.
    """

    fit_data: Callable[[Mapping[str, Any]], Any] = in_order
    """fit_data(batch) gives what ``fit`` would hand to a compiled model's loss, or to ``train_step``: x, (x, y) or
    (x, y, sample_weight). By default the batch's arrays in their order."""


def kept_objects(task: Task) -> list[Kept]:
    """A task's objects whose state is saved under their own names. Raises UserError if ``state`` holds others."""
    return [*kept_state(task.state), *(Kept(f"{HOOKS}{hook.name}", hook) for hook in task.hooks)]
