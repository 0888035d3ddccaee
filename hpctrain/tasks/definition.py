"""The Task classes that the user's task function returns: model, loss and metrics, data, and how layers are split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpctrain.errors import UserError
from hpctrain.tasks.meters import is_stateful
from hpctrain.train.hooks import Hook
from hpctrain.train.stateful import HOOKS, Kept, PerRank, Stateful, kept_state

Score = Any
"""A scalar tensor, the mean over the batch's samples; or two, (sum, weight), if samples have different weights."""


@dataclass(frozen=True)
class PerBatch:
    """Marks a loss or metric that is not a mean over samples, because it compares the samples of a batch.

    It then sees one rank's micro-batch at a time, and its values are averaged, weighted by samples: the result depends
    on the number of ranks. ``ctx.gather`` of a custom step gives a loss the samples of all ranks.
    """

    function: Callable[[Any, Any], Score]
    """function(outputs, batch), the loss or metric."""

    def __call__(self, outputs: Any, batch: Any) -> Score:
        """Calls the function."""
        return self.function(outputs, batch)


def first_field(model: Any, batch: Mapping[str, Any]) -> Any:
    """Apply the model to the first array of the batch."""
    if isinstance(model, Mapping):
        names = ", ".join(map(repr, model))
        fix = "say what is evaluated or predicted: forward=lambda models, batch: models[...](batch[...])"
        raise UserError(f"the task has several models ({names}) and no forward", fix)
    return model(next(iter(batch.values())))


def in_order(batch: Mapping[str, Any]) -> Any:
    """The arrays of a batch as ``fit`` would pass them: a single array as it is, several as a tuple."""
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
    """Validation metric for ReduceLROnPlateau, which is stepped at every evaluation."""


@dataclass(frozen=True)
class Task:
    """Base class of training tasks. Use TorchTask or KerasTask."""

    model: Any
    """torch.nn.Module, or keras.Model; with a custom step also a dict of modules."""
    loss: Any = None
    """loss(outputs, batch) returns the mean over the samples, or (sum, weight). If samples hold two arrays, of which
    the second is the target, also a name such as "mse", or a loss object of the framework. Optional with a custom
    step."""
    optimizer: Any = None
    """torch.optim.Optimizer over the model's parameters, or a list of several for the same loss; or
    keras.optimizers.Optimizer. With a custom step also a dict of them. A parameter may be in only one of them."""
    train: Any = None
    """Training data: a dict of NumPy arrays with a leading sample axis, an HDF5 path, an hpctrain dataset, a torch
    Dataset, a tf.data.Dataset, or a function that returns one of these. With TorchTask also a DataLoader, of which
    dataset, order and collate_fn are used."""
    validation: Any = None
    """Validation data in the same form, or several sets by name: {"dev": ..., "hard": ...}. Metrics of the first set
    have plain names (``loss``), those of the others are prefixed (``hard/loss``)."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Validation metrics by name: a function metric(outputs, batch) that returns the mean or (sum, weight), like loss;
    a metric of torchmetrics or Keras; or a ``Metric``. Metric objects get the output and the second of a batch's two
    arrays, or what a ``Selected`` picks."""
    forward: Callable[[Any, Any], Any] = first_field
    """forward(model, batch) returns the outputs; by default the model is applied to the batch's first array."""
    transform: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None
    """transform(sample, rng) returns the transformed training sample (dict of NumPy arrays); rng is a NumPy Generator
    keyed by (seed, epoch, sample). With data.workers it must be a top-level function or a functools.partial of one."""
    schedule: Callable[[int], float | Sequence[float]] | TorchScheduler | None = None
    """Learning-rate schedule, unless the run file has one: schedule(step) returns the factor on the optimizer's rate
    for the update after ``step`` completed ones, or a sequence with one factor per parameter group; or a
    TorchScheduler."""
    collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None
    """collate(samples) turns a list of samples (dicts of NumPy arrays) into a micro-batch, for training and validation:
    a dict of arrays, the first of which has one row per sample. By default samples are stacked and must have equal
    shapes. ``hpctrain.pad`` is a collate for samples of variable length. Must be importable, like transform."""
    sampler: Callable[[Any], Any] | None = None
    """sampler(epoch) returns the training samples of an epoch in order, in place of data.shuffle: int64[n], with the
    same n in all epochs. ``epoch`` is an ``hpctrain.Epoch``; WeightedSampler and others are ready-made."""
    tokens: str | None = None
    """Name of an array of each batch that has one entry per token, such as the mask of ``hpctrain.pad``: tokens per
    second are then shown, and the monitor measures work in tokens. Of a boolean array the true entries count. Not
    needed for text that ``hpctrain data pack`` made."""
    hooks: Sequence[Hook] = ()
    """Hooks of the training loop, called after hpctrain's own; their state is part of checkpoints."""
    state: Mapping[str, Stateful | PerRank] = field(default_factory=dict)
    """Other objects whose state is part of checkpoints, by name; each has ``state_dict`` and ``load_state_dict``. Rank
    0's state is saved and loaded on all ranks; ``PerRank(object)`` has separate state on each rank."""

    @property
    def mean_metrics(self) -> dict[str, Callable[[Any, Any], Score]]:
        """The metrics that are functions."""
        return {name: metric for name, metric in self.metrics.items() if not is_stateful(metric)}


@dataclass(frozen=True)
class TorchTask(Task):
    """A task whose model is a torch.nn.Module, or a dict of several."""

    step: Callable[[Any, dict[str, Any]], Mapping[str, Any] | None] | None = None
    """step(ctx, batch) trains on one global batch with ``ctx.backward`` and ``ctx.update``; see
    ``hpctrain.StepContext``. It may return metrics by name."""
    tensor: Mapping[str, LayerCut] = field(default_factory=dict)
    """How layers are partitioned over ``parallel.tensor`` ranks: ``hpctrain.columns``, ``hpctrain.rows`` or
    ``hpctrain.vocabulary`` by layer-name pattern, such as ``{"blocks.*.up": columns, "blocks.*.down": rows}``."""
    layers: Callable[[Any], Sequence[Callable[[Any], Any]] | Sequence[Sequence[Callable[[Any], Any]]]] | None = None
    """layers(model) lists the model's layers in order of application, to split it into ``parallel.pipeline`` stages:
    ``lambda model: [model.embed, *model.blocks, model.head]``. A function in the list gets the modules whose parameters
    it uses by ``functools.partial``. The split balances the stages' times; to choose it, return a list of layers per
    stage. Not needed for an ``nn.Sequential``."""

    @property
    def own_features(self) -> Mapping[Any, Any]:
        """Features, as in config.features, that only the task's library knows."""
        return {}

    @property
    def own_meters(self) -> Mapping[str, Any]:
        """Meters of metrics that are not of torchmetrics."""
        return {}


@dataclass(frozen=True)
class KerasTask(Task):
    """A task whose model is a Keras 3 model, on Keras' PyTorch or TensorFlow backend.

    The loss, metrics and optimizer of a compiled model are used, and so is a custom ``train_step``.
    """

    fit_data: Callable[[Mapping[str, Any]], Any] = in_order
    """fit_data(batch) returns what ``fit`` would pass to a compiled model's loss, or to ``train_step``: x, (x, y) or
    (x, y, sample_weight). By default the batch's arrays in order."""


def kept_objects(task: Task) -> list[Kept]:
    """The objects in a task's ``state`` and ``hooks``, to save by name. Raises UserError if one cannot be saved."""
    return [*kept_state(task.state), *(Kept(f"{HOOKS}{hook.name}", hook) for hook in task.hooks)]


@dataclass(frozen=True)
class LayerCut:
    """How a layer is split: by ``columns``, ``rows`` or ``vocabulary``."""

    kind: Literal["columns", "rows", "vocabulary"]
    parts: int = 1
    """Number of equal parts of the outputs, each split separately: 3 for queries, keys and values in one layer."""
    heads: int | None = None
    """Number of heads per part of the outputs, none of which is split; None if any split will do."""
    gathers: bool = False
    """Whether each rank gets the outputs of all ranks."""
    classes: bool = False
    """Whether outputs are logits for ``hpctrain.cross_entropy``."""


@dataclass(frozen=True)
class Columns(LayerCut):
    """The type of ``columns``, which can be used as it is or called with options."""

    kind: Literal["columns", "rows", "vocabulary"] = "columns"

    def __call__(
        self, parts: int = 1, heads: int | None = None, gathers: bool = False, classes: bool = False
    ) -> Columns:
        """Splits a layer by outputs.

        Args:
            parts: equal parts of the outputs, each split separately: 3 for queries, keys and values in one layer.
            heads: number of heads per part, none of which is split.
            gathers: each rank gets the outputs of all ranks, as most losses need for the last layer.
            classes: the outputs are logits, each rank keeps those of its classes, and the loss is computed by
                ``hpctrain.cross_entropy``. In evaluations and predictions they are gathered.

        Raises:
            UserError: outputs in several parts cannot be gathered or be classes, or a number is not positive.
        """
        if parts < 1 or (heads is not None and heads < 1):
            raise UserError(f"columns(parts={parts}, heads={heads}) is not a possible split", "give positive numbers")
        if gathers and parts > 1:
            fix = "leave gathers=True out, and let a layer with `rows` follow; or give each part a separate layer"
            raise UserError(f"columns(parts={parts}, gathers=True) would mix the parts", fix)
        if classes and (gathers or parts > 1):
            fix = "write columns(classes=True) for a loss by hpctrain.cross_entropy, columns(gathers=True) for others"
            raise UserError(f"columns(parts={parts}, gathers={gathers}, classes=True) contradicts itself", fix)
        return replace(self, parts=parts, heads=heads, gathers=gathers, classes=classes)


@dataclass(frozen=True)
class Rows(LayerCut):
    """The type of ``rows``, which can be used as it is or called."""

    kind: Literal["columns", "rows", "vocabulary"] = "rows"

    def __call__(self) -> Rows:
        """Returns itself."""
        return self


columns = Columns()
"""For ``torch.nn.Linear``: each rank computes some of the outputs from the whole input."""
rows = Rows()
"""For ``torch.nn.Linear``: each rank has some of the inputs, left to it by a layer with ``columns``; the outputs are
summed over the ranks, and all ranks get them."""
vocabulary = LayerCut("vocabulary")
"""For ``torch.nn.Embedding``: each rank has some of the table's rows, and all ranks get all vectors."""
ColwiseParallel = columns
"""``columns`` under DTensor's name; ``ColwiseParallel()`` is the same."""
RowwiseParallel = rows
"""``rows`` under DTensor's name; ``RowwiseParallel()`` is the same."""
