"""The run file: one frozen dataclass a section, and the only place where defaults live.

Units are part of the names (``_steps``, ``_s``, ``_bytes``). Every field has a docstring: they make ``--help`` and the
reference page. Ranges of numbers are part of their types, other checks in ``__post_init__``; features that do not go
together are in ``combinations``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)
from urllib.parse import urlsplit

from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, used, values_of
from hpctrain.config.values import KEPT_BY_LIBRARIES, holds_credentials, refuse_credentials
from hpctrain.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LARGEST_SEED = 2**64 - 1
"""What the generators of data order and frameworks take."""
MOST_EPOCHS = 10**6
"""Larger numbers are mistakes."""


class WrongValue(UserError):
    """A key of the run file has a value that it does not take."""

    def __init__(self, key: str, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.key = key
        """The key, dotted; of several that cannot be combined, the first."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.what, self.fix)


@dataclass(frozen=True)
class Range:
    """Numbers that a key takes, as part of its type."""

    least: float | None = None
    above: float | None = None
    most: float | None = None

    def check(self, key: str, value: float) -> None:
        """Raises WrongValue for a number that is out of range, or none (NaN)."""
        fix = None
        if self.least is not None and not value >= self.least:
            fix = f"give {self.least} or more"
        elif self.above is not None and not value > self.above:
            fix = f"give a number above {self.above}"
        elif self.most is not None and value > self.most:
            fix = f"give {self.most} or less"
        if fix is not None:
            raise WrongValue(key, f"{key} is {value}", fix)


STORES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")
"""Schemes of the URLs of object stores that checkpoints are copied to."""

Positive = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
AboveZero = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(above=0, most=1)]

Value = TypeVar("Value")
DECIDES = "results depend on it"
Decisive = Annotated[Value, DECIDES]
"""Type of a key, or of a section, that changes what is computed: a resumed run must have the same value. An earlier
version that lacks the key computed what its default does."""


def marks(hint: Any) -> Iterator[object]:
    """What a type, or a part of it, is annotated with."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from marks(part)


@dataclass_transform(frozen_default=True)
class Section:
    """A part of the run file, a frozen dataclass, whose numbers are in the ranges that their types name."""

    _key: ClassVar[str]
    """Of the section in the run file; empty for the whole file."""
    _ranges: ClassVar[Mapping[str, Range]]
    """By field: of its type, or of the items of a tuple."""
    _decisive: ClassVar[tuple[str, ...]]
    """Keys on which results depend, dotted."""

    def __init_subclass__(cls, key: str) -> None:
        cls._key = key
        hints = get_type_hints(cls, include_extras=True).items()
        found = [(name, mark) for name, hint in hints for mark in marks(hint)]
        cls._ranges = {name: mark for name, mark in found if isinstance(mark, Range)}
        cls._decisive = tuple(f"{key}.{name}".lstrip(".") for name, mark in found if mark == DECIDES)
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        for name, allowed in self._ranges.items():
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None:
                    allowed.check(f"{self._key}.{name}".lstrip("."), number)


class EarlyStopConfig(Section, key="train.early_stop"):
    """Stop when a validation metric no longer improves."""

    metric: str | None = None
    """Validation metric to watch, such as loss; none: no early stopping."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    patience: Positive = 3
    """Evaluations without improvement before the run ends."""
    min_delta: NotNegative = 0.0
    """Smallest change that counts as an improvement."""


class TrainConfig(Section, key="train"):
    """How long, how large, and in which precision."""

    epochs: Positive | None = None
    """Passes over the training data. Exactly one of epochs and steps."""
    steps: Positive | None = None
    """Optimizer updates. Exactly one of epochs and steps."""
    global_batch: Positive | None = None
    """Samples of one update over all ranks. Exactly one of global_batch and batch_per_rank."""
    batch_per_rank: Positive | None = None
    """Samples of one update on each rank: the global batch grows with the number of ranks."""
    accumulate: Decisive[Positive] = 1
    """Micro-batches per update (gradient accumulation); gradients are exchanged once per update."""
    precision: Decisive[Literal["fp32", "bf16", "fp16"]] = "fp32"
    """Compute type of forward and backward; parameters and gradients stay fp32 (fp16 with loss scaling)."""
    matmul: Decisive[Literal["exact", "tf32"] | None] = None
    """Matrix products and convolutions in fp32 on GPUs. tf32: on tensor cores, with factors rounded to 10 bits; exact:
    in fp32; by default as the framework does (PyTorch: matrix products in fp32, convolutions in TF32; Keras: TF32)."""
    cudnn_benchmark: bool = False
    """PyTorch: let cuDNN time its convolution kernels for each shape of a batch and use the fastest. Two runs may use
    different ones, so that results are not bitwise repeatable."""
    clip_norm: Decisive[AboveZero | None] = None
    """Largest global L2 norm of the averaged gradient; larger ones are scaled down to it."""
    ema_decay: Decisive[float | None] = None
    """Decay of the exponential moving average of the weights, which evaluation then uses; by default no average."""
    eval_every_epochs: Positive | None = 1
    """Evaluate every N epochs."""
    eval_every_steps: Positive | None = None
    """Also evaluate every N steps."""
    eval_batch_per_rank: Positive | None = None
    """Samples of one validation batch on each rank; by default the size of a training micro-batch."""
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    """Stop when a validation metric no longer improves."""
    compile: bool = False
    """PyTorch: torch.compile the loss and the model, on several ranks its repeated layers one by one, so that gradients
    are exchanged while backward runs; Keras: let XLA compile the step."""
    compile_mode: Literal["default", "max-autotune", "reduce-overhead"] = "default"
    """PyTorch: what compiling takes more time for. max-autotune: kernels of matrix products and convolutions are chosen
    by timing them; reduce-overhead: CUDA graphs, for models whose kernels take less time than launching them."""
    sync_batchnorm: Decisive[bool] = False
    """BatchNorm normalises over the samples of all ranks, so that N ranks train as one does."""
    recompute: tuple[str, ...] = ()
    """PyTorch: activation checkpointing. Patterns of layers, such as blocks.* or * for all, whose activations are
    recomputed in the backward pass: less memory, more time, the same results."""
    channels_last: bool = False
    """PyTorch: keep 4-dimensional tensors in channels-last memory format."""
    threads: Positive | None = None
    """Compute threads of each rank; by default the launcher's share of the node's cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            key = "train.ema_decay"
            raise WrongValue(key, f"{key} is {self.ema_decay}", "give a number between 0 and 1, such as 0.999")
        key = "train.compile_mode"
        if self.compile_mode != "default" and not self.compile:
            raise WrongValue(key, f"{key} is given without train.compile", "set train.compile: true")
        if self.compile_mode == "reduce-overhead" and self.recompute:
            what = f"{key} is reduce-overhead, and layers of train.recompute run again in the backward pass"
            raise WrongValue(key, f"{what}, which CUDA graphs do not record", f"leave {key} or train.recompute out")


OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"),
    "adam": ("betas", "eps", "amsgrad"),
    "adamw": ("betas", "eps", "amsgrad"),
    "nadam": ("betas", "eps"),
    "adamax": ("betas", "eps"),
    "rmsprop": ("rho", "momentum", "eps"),
    "adagrad": ("eps",),
    "adadelta": ("rho", "eps"),
}
"""The optimizers of both frameworks that a run file can name, and what each takes besides lr and weight_decay."""


class OptimizerConfig(Section, key="optimizer"):
    """The optimizer, if the task gives none. Options that are not set have the framework's defaults."""

    name: Literal["sgd", "adam", "adamw", "nadam", "adamax", "rmsprop", "adagrad", "adadelta"] | None = None
    """Class of torch.optim or keras.optimizers; by default the task gives an optimizer."""
    lr: NotNegative | None = None
    """Learning rate."""
    weight_decay: NotNegative | None = None
    """Weight decay as the framework's class applies it: decoupled by adamw and all of Keras, else an L2 penalty."""
    momentum: NotNegative | None = None
    """sgd, rmsprop: momentum."""
    nesterov: bool | None = None
    """sgd: Nesterov's momentum."""
    betas: tuple[float, ...] = ()
    """The adam family: decay of the averages of gradients and of their squares, such as [0.9, 0.95]."""
    rho: NotNegative | None = None
    """rmsprop, adadelta: decay of the average of squared gradients (alpha of PyTorch's RMSprop)."""
    eps: NotNegative | None = None
    """Added to the denominator; all optimizers except sgd."""
    amsgrad: bool | None = None
    """adam, adamw: the AMSGrad variant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        takes = ("lr", "weight_decay", *OPTIMIZERS.get(self.name or "", ()))
        for option in self.options:
            if self.name is None:
                what = f"optimizer.{option} is given without optimizer.name"
                raise WrongValue(f"optimizer.{option}", what, f"name one of {', '.join(OPTIMIZERS)}")
            if option not in takes:
                fix = f"leave it out; {self.name} takes {', '.join(takes)}"
                raise WrongValue(f"optimizer.{option}", f"optimizer {self.name} has no {option}", fix)
        if self.betas and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            fix = "give two numbers from 0 to below 1, such as [0.9, 0.999]"
            raise WrongValue("optimizer.betas", f"optimizer.betas is {list(self.betas)}", fix)
        if self.nesterov and not self.momentum:
            what = "optimizer.nesterov is given without optimizer.momentum"
            raise WrongValue("optimizer.nesterov", what, "give a momentum, such as 0.9")

    @property
    def options(self) -> dict[str, Any]:
        """What is given besides the name."""
        given = {key: value for key, value in vars(self).items() if key != "name"}
        return {key: value for key, value in given.items() if is_given(value)}


class PlateauConfig(Section, key="schedule.plateau"):
    """Lower the learning rate when a validation metric no longer improves."""

    metric: str = "loss"
    """Validation metric that schedule.kind: plateau watches."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    patience: Positive = 3
    """Evaluations without improvement before the rate is lowered."""
    min_delta: NotNegative = 0.0
    """Smallest change that counts as an improvement."""
    factor: Share = 0.1
    """Factor on the rate each time, down to final_factor."""
    cooldown: Natural = 0
    """Evaluations to ignore after the rate was lowered."""


class ScheduleConfig(Section, key="schedule"):
    """The learning rate as a factor on the optimizer's own."""

    kind: Literal[
        "constant", "linear", "cosine", "step", "polynomial", "exponential", "restarts", "one_cycle", "wsd", "plateau"
    ] = "constant"
    """Shape after the warm-up. linear, cosine, polynomial, one_cycle and wsd (warm-up, stable, decay) decay to
    final_factor at the last step; the others do not depend on the run's length."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with the number of ranks (Goyal et al. 2017: linear)."""
    base_batch: Positive | None = None
    """Global batch that the optimizer's learning rate was tuned for; by default one rank's batch."""
    warmup_steps: Natural | None = None
    """Steps over which the rate rises to its full value, from the unscaled rate or, without scaling, from 0. At most
    one of warmup_steps and warmup_epochs."""
    warmup_epochs: Annotated[float, Range(least=0, most=MOST_EPOCHS)] | None = None
    """The same, in epochs."""
    final_factor: NotNegative = 0.0
    """Final factor of the decaying kinds (of the step after the last), of each cycle of restarts, and of plateau."""
    power: AboveZero = 2.0
    """Exponent of polynomial."""
    step_epochs: tuple[int, ...] = ()
    """Epochs after which a step schedule multiplies the rate by step_factor."""
    step_factor: AboveZero = 0.1
    """Factor of step at each of step_epochs."""
    decay_factor: AboveZero = 0.95
    """Factor of exponential per epoch, applied in equal parts at each step."""
    cycle_epochs: Annotated[float, Range(above=0, most=MOST_EPOCHS)] | None = None
    """Length of the first cycle of restarts, each of which is a cosine decay (Loshchilov and Hutter 2017)."""
    cycle_growth: Annotated[float, Range(least=1)] = 1.0
    """Length of each cycle of restarts relative to the previous one."""
    start_factor: NotNegative = 0.04
    """Initial factor of one_cycle (Smith and Topin 2018)."""
    climb_share: Share = 0.3
    """Share of all steps in which one_cycle rises to the full rate."""
    decay_share: Share = 0.2
    """Share of all steps, at the end, in which wsd decays linearly."""
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    """Lower the rate when a validation metric no longer improves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "step" and not self.step_epochs:
            empty = "schedule.kind is step but schedule.step_epochs is empty"
            raise WrongValue("schedule.kind", empty, "name epochs, such as [30, 60]")
        if self.kind == "restarts" and self.cycle_epochs is None:
            empty = "schedule.kind is restarts but schedule.cycle_epochs is missing"
            raise WrongValue("schedule.kind", empty, "give the length of the first cycle, such as 10")


SHARDS = values_of("parallel.shard")
if TYPE_CHECKING:
    Shard: TypeAlias = str
else:
    Shard = Literal["none", *SHARDS]


class ParallelConfig(Section, key="parallel"):
    """How a model is partitioned over ranks."""

    tensor: Positive = 1
    """PyTorch: size of the groups of ranks, on one node, that split the layers in the task's tensor=. Each group trains
    on its own samples."""
    pipeline: Positive = 1
    """PyTorch: number of pipeline stages into which the layers of the model are divided: those of the task's layers=,
    or of an nn.Sequential. The batch passes through them in the micro-batches of train.accumulate."""
    shard: Shard = "none"
    """What is sharded over the ranks (PyTorch); results and checkpoints are the same."""
    shard_within: Literal["all", "node"] = "all"
    """Ranks over which shard: parameters or gradients divides rows: all, or those of each node (HSDP). Each node then
    holds a copy of the model and gathers layers without the network, which carries sums of rows only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_within == "node" and not self.gathers:
            what = f"parallel.shard_within is node, and parallel.shard is {self.shard}"
            raise WrongValue("parallel.shard_within", what, "leave it out, or set parallel.shard: parameters")

    @property
    def gathers(self) -> bool:
        """Whether each rank has rows of all parameters, and gathers layers to compute."""
        return self.shard in ("parameters", "gradients")


class ReduceConfig(Section, key="reduce"):
    """How gradients are averaged over the ranks."""

    kind: Literal["auto", "horovod", "mpi", "nccl", "none"] = "auto"
    """The reducer. nccl: PyTorch's process groups (RCCL on AMD GPUs, XCCL on Intel's, gloo on CPUs); auto: nccl if each
    rank has a GPU, otherwise the fastest candidate, measured before the first update."""
    compression: Decisive[Literal["none", "fp16", "bf16", "int8", "auto"]] = "none"
    """Type in which gradients are sent instead of fp32; auto measures none and fp16. int8 adds its rounding errors to
    the next update (error feedback)."""
    compress_where: Decisive[Literal["everywhere", "between_nodes"]] = "everywhere"
    """What int8 compresses: all messages, or only those between nodes, after summing in fp32 within each node."""
    compress_after_steps: Decisive[Natural] = 0
    """Updates at the beginning of a run that int8 does not compress."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Send a bucket as soon as its gradients are ready (on), or everything after backward (off)."""
    bucket_bytes: Annotated[int, Range(least=1024)] | None = None
    """Size of a bucket if buckets are sent during backward; by default 8 MiB on CPUs, and 25 MiB on GPUs, where the
    first and the last one have 1 MiB: the first is sent early, and nothing hides the last."""
    exact: Decisive[bool] = True
    """On GPUs: add in an order that is the same in each run. false lets NCCL add in switches (NVLS, CollNet), which is
    faster; the last bits may then differ."""
    sparse: Literal["auto", "densify", "refuse"] = "auto"
    """Sparse gradients of embeddings: auto sends only rows if that does not change the result, densify makes them
    dense, refuse names them and ends the run."""
    verify_every_steps: Positive | None = None
    """Compare a hash of the weights over all ranks every N steps, and fail on a difference; by default once, after the
    first step."""

    def features(self) -> dict[Feature, Any]:
        """What of this section does not work with everything."""
        given = {
            Feature.BF16_SUMS: self.compression == "bf16",
            Feature.FP16_SUMS: self.compression == "fp16",
            Feature.DENSIFY: self.sparse == "densify",
            Feature.HOROVOD: self.kind == "horovod",
            Feature.INT8_SUMS: self.compression == "int8",
            Feature.NO_REDUCER: self.kind == "none",
            Feature.OVERLAP: self.overlap == "on",
            Feature.PROCESS_GROUPS: self.kind == "nccl",
            Feature.VERIFY: self.verify_every_steps,
        }
        return used(given)


class SyncConfig(Section, key="sync"):
    """When ranks exchange what they have learned."""

    kind: Literal["every_step", "local"] = "every_step"
    """every_step: exchange gradients in each update; local: local SGD, with an outer step every N updates."""
    every_steps: Positive = 32
    """Updates per round, after which an outer step is made."""
    after_steps: Natural = 0
    """Updates at the beginning of a run in which gradients are still exchanged."""
    outer_lr: AboveZero = 1.0
    """Learning rate of outer steps; 1 without momentum averages the weights. DiLoCo: 0.7, and a momentum of 0.9."""
    outer_momentum: Annotated[float, Range(least=0, most=0.999)] = 0.7
    """Nesterov momentum of outer steps."""
    within: Literal["none", "node"] = "none"
    """node: the ranks of a node exchange gradients in each update, and nodes train independently."""
    overlap: bool = False
    """Overlap the exchange with updates: a sixteenth of the weights at a time (Streaming DiLoCo)."""
    by_speed: bool = False
    """Let slow ranks (or nodes) make fewer updates per round, as measured in the first round."""


class DataConfig(Section, key="data"):
    """How samples are ordered and loaded."""

    shuffle: Decisive[Literal["full", "block", "none"]] = "full"
    """full: a permutation of all samples each epoch; block: of blocks, and of samples within groups of blocks, for data
    larger than memory; none: as stored."""
    block_samples: Decisive[Positive] = 1024
    """Samples in a block, for shuffle: block."""
    drop_last: Decisive[bool] = False
    """Drop the last, smaller global batch of an epoch."""
    prefetch_batches: Natural = 2
    """Batches that each rank prepares in advance; 0 reads within the step."""
    workers: Natural = 0
    """Worker processes for heavy transforms; 0 uses one thread."""
    allow_outside: tuple[str, ...] = ()
    """Folders that links, virtual sources and external storage of HDF5 files may lead to, in addition to the data's."""


@dataclass(frozen=True)
class TierConfig:
    """Snapshots on the nodes themselves, the newest of which a restart reads first."""

    every_steps: int | Literal["auto"] | None = None
    """Take a snapshot every N steps, which replaces the previous one; auto: Daly's interval, as checkpoint.interval."""
    path: str | None = None
    """Folder on the node, for memory by default /dev/shm; $NAME in it is expanded on the node."""
    copies: int = 0
    """1: each node also sends its part of a snapshot to the next node, so that a lost node costs no snapshot."""


@dataclass(frozen=True)
class RunDirTierConfig:
    """The run folder as the last tier."""

    every_steps: int | Literal["auto"] | None = None
    """The same as checkpoint.every_steps; auto: the same as checkpoint.interval."""


class StoreTierConfig(Section, key="checkpoint.tiers.store"):
    """Copies of the run folder's checkpoints in an object store, for a resume that does not find them in the folder."""

    url: str | None = None
    """Folder of this run in the store: s3://bucket/folder, gs://, az:// or file:///path, without credentials."""
    every_steps: Positive | None = None
    """Copy the first checkpoint at or after every N steps; by default every checkpoint."""
    wait_s: AboveZero = 120.0
    """Longest wait for the last copy at the end of a run; 20 seconds if it was asked to stop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url is None:
            if self.every_steps:
                raise UserError("checkpoint.tiers.store has no url", "set it to a folder such as s3://bucket/folder")
            return
        require_store(self.url, "checkpoint.tiers.store.url")


def require_store(url: str, what: str) -> None:
    """Raises UserError unless this is the URL of an object store without credentials, which are not repeated."""
    refuse_credentials(url, what)
    parts = urlsplit(url)
    if parts.query:
        raise UserError(f"{what} has more than a path after its bucket", "end it before the question mark")
    if parts.scheme not in STORES or not (parts.netloc or parts.path):
        raise UserError(f"{what} is {url}", f"begin it with {', '.join(f'{each}://' for each in STORES)}")


@dataclass(frozen=True)
class TiersConfig:
    """Where the newest state is kept, and how often."""

    memory: TierConfig = field(default_factory=TierConfig)
    """The node's memory."""
    scratch: TierConfig = field(default_factory=TierConfig)
    """A disk of the node."""
    run_dir: RunDirTierConfig = field(default_factory=RunDirTierConfig)
    """The run folder."""
    store: StoreTierConfig = field(default_factory=StoreTierConfig)
    """An object store."""

    def __post_init__(self) -> None:
        for name in ("memory", "scratch", "run_dir"):
            steps = getattr(self, name).every_steps
            at_least(f"checkpoint.tiers.{name}.every_steps", None if steps == "auto" else steps, 1)
        for name, tier in (("memory", self.memory), ("scratch", self.scratch)):
            if tier.copies not in (0, 1):
                raise UserError(f"checkpoint.tiers.{name}.copies is {tier.copies}", "set it to 0 or 1")
        if self.scratch.every_steps and not self.scratch.path:
            raise UserError("checkpoint.tiers.scratch has no path", "set it to a folder on a disk of the node")


class CheckpointConfig(Section, key="checkpoint"):
    """When checkpoints are written, how, and which are kept."""

    enabled: bool = True
    """Write checkpoints."""
    every_steps: Positive | None = None
    """Save every N steps."""
    every_minutes: AboveZero | None = None
    """Save every N minutes."""
    every_epochs: Positive | None = None
    """Save every N epochs."""
    interval: Literal["auto", "none"] = "auto"
    """auto: without every_..., the Young/Daly interval from the measured cost and the mean time between failures."""
    mtbf_hours: AboveZero = 24.0
    """Expected mean time between failures of the whole job; failures of the run correct it."""
    overhead_budget: AboveZero = 0.035
    """Largest share of the run's time that automatic checkpoints may cost."""
    best_metric: str | None = None
    """Save whenever this validation metric improves, and keep that checkpoint."""
    best_mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    keep_last: Positive = 3
    """Newest checkpoints that are kept."""
    keep_every_steps: Positive | None = None
    """Keep forever the first checkpoint at or after each multiple of N steps."""
    tiers: TiersConfig = field(default_factory=TiersConfig)
    """Snapshots on the nodes themselves."""
    mode: Literal["async", "sync"] = "async"
    """async: write in the background while training continues; sync: wait for the disk."""
    writers: Literal["all", "node", "one"] = "all"
    """Which ranks write replicated state: all, one per node (each a part), or only rank 0."""
    verify_replicated: bool = False
    """Check at each save that replicated state is equal on all ranks (for debugging)."""
    init_from: str | None = None
    """Source of the initial weights (fine-tuning): a run folder, checkpoint, Hugging Face model folder, or a file:
    .safetensors, .pt, .pth, .bin, .ckpt, or Keras' .weights.h5."""
    init_rename: dict[str, str] = field(default_factory=dict)
    """Prefixes of names in init_from, and their replacements in the model, such as {"encoder.": "model.encoder."}."""
    init_missing: tuple[str, ...] = ()
    """Patterns of the model's weights, such as head.*, that keep their initial values if init_from lacks them or has
    them in another shape. For other weights that is an error."""
    accept: tuple[str, ...] = ()
    """Keys that may differ from those of the checkpoint that is resumed, though the result depends on them, such as
    train.epochs; or state.NAME or model.NAME for state or tensors of the model that only the task or only the
    checkpoint has. On the command line: --accept KEY."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiers.run_dir.every_steps and (self.every_steps or self.every_minutes or self.every_epochs):
            what = "checkpoint.tiers.run_dir.every_steps and another checkpoint.every_... are both given"
            raise UserError(what, "keep one of them")


class MonitorConfig(Section, key="monitor"):
    """What is watched during the run."""

    enabled: bool = True
    """Watch for stragglers and hangs."""
    window_steps: Annotated[int, Range(least=4)] = 32
    """Steps per window, whose medians are compared."""
    hang_s: AboveZero | None = None
    """Seconds without a finished step that count as a hang (first step: at least 900); by default 10 times the longest
    pause so far, at least 120."""
    on_hang: Literal["report", "abort"] = "abort"
    """abort: end the attempt, which restarts from the last checkpoint; report: only report."""
    action: Literal["report", "exclude_on_requeue"] = "report"
    """exclude_on_requeue: exclude a host that is confirmed to be slow itself from the next requeue."""
    exclude_hours: AboveZero = 24.0
    """Hours for which a slow host, or one that breaks attempts, stays excluded."""
    host_interval_s: AboveZero = 5.0
    """Seconds between readings of the hosts' counters."""


class ProfileConfig(Section, key="track.profile"):
    """Record what the framework does in some steps: torch.profiler or tf.profiler."""

    first_step: Positive | None = None
    """First step to profile; none: no profile. Traces go to <run folder>/profile."""
    last_step: int | None = None
    """Last step to profile; by default four steps after the first."""
    ranks: tuple[Natural, ...] = (0,)
    """Ranks to profile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last_step is not None and self.last_step < (self.first_step or self.last_step + 1):
            what = f"track.profile.last_step is {self.last_step} and first_step {self.first_step}"
            raise WrongValue("track.profile.last_step", what, "give first_step, and a last_step that is not before it")


class TrackConfig(Section, key="track"):
    """Where progress is reported."""

    every_steps: Positive = 10
    """Steps of one reported interval."""
    tensorboard: bool = False
    """Write TensorBoard scalars to <run folder>/tensorboard."""
    mlflow: str | None = None
    """MLflow tracking URI (a folder or a server)."""
    mlflow_experiment: str = "hpctrain"
    """MLflow experiment of the run."""
    wandb: str | None = None
    """Weights & Biases project of the run; WANDB_MODE=offline keeps it in the run folder."""
    prometheus: str | None = None
    """Text file for a node exporter's textfile collector."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Record what the framework does in some steps."""


class SlurmConfig(Section, key="launch.slurm"):
    """What the job asks of Slurm. Empty fields are left to the site profile, then to the site."""

    profile: str = "generic"
    """Site profile: a name, or a path to a TOML file."""
    account: str | None = None
    """Account to charge."""
    partition: str | None = None
    """Partition, or several separated by commas."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features."""
    reservation: str | None = None
    """Reservation."""
    licenses: str | None = None
    """Licences, such as matlab:1."""
    mail_user: str | None = None
    """Address for mail."""
    mail_type: str | None = None
    """Events that send mail, such as END,FAIL."""
    comment: str | None = None
    """Text that the queue shows with the job."""
    begin: str | None = None
    """Earliest start, such as now+1hour or 2027-01-31T18:00."""
    time: str | None = None
    """Time limit of one attempt, as Slurm writes it: 30 (minutes), 01:30:00, 2-12:00:00."""
    time_min: str | None = None
    """Shortest acceptable time limit, if that starts the job earlier."""
    memory: str | None = None
    """Memory: '4G' for each node, '2G/cpu' for each core, '16G/gpu' for each GPU, '0' for all of the node."""
    exclusive: bool | None = None
    """Do not share the nodes with other jobs."""
    gpus_per_node: Positive | None = None
    """GPUs of each node; one rank each unless launch.ranks_per_node says otherwise."""
    gpu_type: str | None = None
    """GPU model, if the site requires it."""
    gpu_request: Literal["gres", "gpus-per-node", "gpus-per-task"] | None = None
    """Option by which the site's GPUs are requested."""
    cpus_per_rank: Positive | None = None
    """Cores of each rank."""
    cpu_bind: str | None = None
    """Value of srun's --cpu-bind: cores, none, or masks of the site."""
    mpi: str | None = None
    """Value of srun's --mpi: pmix, pmix_v4, pmi2, cray_shasta."""
    srun_options: tuple[str, ...] = ()
    """More options of srun."""
    mpirun_options: tuple[str, ...] = ()
    """More options of mpirun."""
    wrap: tuple[str, ...] = ()
    """Command prefix of each rank: apptainer exec --nv image.sif. The image needs hpctrain."""
    scratch: str | None = None
    """Node-local folder that stage-in copies to; $NAME at its beginning is expanded on the node."""
    exclude: tuple[str, ...] = ()
    """Hosts to exclude."""
    bad_nodes: Literal["run", "shared", "off"] = "run"
    """Exclude nodes that break attempts: those found by this run, by all your runs with shared, or none."""
    requeue: bool | None = None
    """Requeue the job if it stops before the end of the run; false if the site forbids it (see submit --chain)."""
    max_requeues: Natural = 20
    """Starts of the job beyond the first, whoever requeued it, after which the run ends; resume resets the count."""
    signal_s: Positive | None = None
    """Seconds before the time limit at which the job is asked to stop; by default from measured step and save times."""
    extra: tuple[str, ...] = ()
    """More directives, as written in a script: --nice=100."""
    skip: tuple[str, ...] = ()
    """Directives to omit, by name: --mem."""
    replace: dict[str, str] = field(default_factory=dict)
    """Lines that replace directives, by name: {--gres: --gres=gpu:v100:4}."""


class KubernetesConfig(Section, key="launch.kubernetes"):
    """The pods of a run on Kubernetes, one on each of launch.nodes."""

    kind: Literal["Job", "TrainJob"] = "Job"
    """What creates the pods: an Indexed Job, or a TrainJob of Kubeflow Trainer 2."""
    image: str | None = None
    """Image with hpctrain, its ``runners`` extra and the task."""
    namespace: str | None = None
    """Namespace; by default that of kubectl's context."""
    volumes: dict[str, str] = field(default_factory=dict)
    """Persistent volume claims that all pods mount, by mount path; the run folder is on the first one."""
    user: Natural = 1000
    """User and group that the pods run as; not 0, unless the namespace allows it."""
    cpus: str | None = None
    """Cores of a pod, as Kubernetes writes it: 8, 500m; by default one per thread of its ranks."""
    memory: str | None = None
    """Memory of a pod: 32Gi. Shared memory counts in it."""
    gpus: Natural = 0
    """GPUs of a pod."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of the cluster's GPUs."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm."""
    scratch: str | None = None
    """Size of a node-local folder at /scratch, initially empty; TMPDIR is in it."""
    queue: str | None = None
    """Kueue's local queue."""
    grace_s: Positive = 300
    """Grace period of pods: enough for a step and a save, and at least 15 s longer than stop_grace_s."""
    restarts: Natural = 20
    """Failed pods after which the run ends. Evicted ones do not count."""
    port: Positive = 7777
    """Port of pod 0 that the others connect to."""
    pod: dict[str, Any] = field(default_factory=dict)
    """Further fields of a pod's spec, as Kubernetes names them: {nodeSelector: {...}, tolerations: [...]}."""


Engine = Literal["local", "hosts", "slurm", "pbs", "lsf", "gridengine", "flux", "kubernetes", "runners", "ray", "spark"]


class LaunchConfig(Section, key="launch"):
    """How ranks are started."""

    nodes: Positive = 1
    """Nodes."""
    min_nodes: Positive | None = None
    """Number of nodes on which the run continues in the same job if others are lost; by default it needs all nodes."""
    spare_nodes: Natural = 0
    """Additional nodes of the job, or the last of ``hosts``, that wait to replace lost ones."""
    engine: Engine | None = None
    """Where ranks run: with a batch system, on all hosts of its job; with runners, on the first ``nodes`` on which
    hpctrain node runs; with ray or spark, on that many nodes of such a cluster. By default hpctrain submit takes slurm,
    and hpctrain run takes ``hosts``, or local: this machine."""
    ticket: str | None = None
    """For runners: file by which hpctrain node finds this run; by default HPCTRAIN_NODE_KEY and _ADDRESS are used."""
    node_wait_s: float = 600.0
    """Longest wait in seconds for the nodes of runners to join, and for lost hosts to return if too few are left."""
    hosts: tuple[str, ...] = ()
    """Machines on which hpctrain run starts the ranks, without a scheduler; by default only this one."""
    remote_shell: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
    """Command that runs a command line on one of ``hosts``. The command line is appended as one argument, or replaces
    {command} as words that need no quotes, for programs that start others without a shell."""
    ranks_per_node: Positive | None = None
    """Ranks on each node; by default launch.slurm.gpus_per_node, else one."""
    launcher: Literal["auto", "srun", "mpirun"] = "auto"
    """What starts the ranks inside a Slurm job."""
    command: tuple[str, ...] = ()
    """Program to run on every rank instead of a task. If it exits with 75, it is run again."""
    convention: Literal["auto", "torch", "tensorflow", "mpi"] = "auto"
    """Environment variables for the program of command: torchrun's (RANK, MASTER_ADDR, ...), TF_CONFIG, both, or only
    MPI's."""
    stop_signal: Literal["TERM", "USR1", "USR2", "INT"] = "TERM"
    """Signal that asks the program of command to stop."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for every rank."""
    modules: tuple[str, ...] = ()
    """Environment modules that the job loads."""
    setup: tuple[str, ...] = ()
    """Shell lines to run in the job before the launch, copied verbatim."""
    stage_in: tuple[str, ...] = ()
    """Files and folders to copy to node-local scratch, once per node; task_args that name one get the copy's path."""
    stage_environment: bool | None = None
    """Also copy the Python environment there; the default on 32 or more nodes: imports from a shared disk are slow."""
    preflight: bool = True
    """Check ranks, hosts, devices, folders and an allreduce before the launch in a Slurm job; measure GPUs, links."""
    max_failures: Natural | None = None
    """Failures in a row without a new checkpoint after which a run is not restarted; lost nodes do not count. By
    default 3; for launch.command under hpctrain run 0, so that its first failure ends it."""
    stop_grace_s: AboveZero = 60.0
    """Seconds from a stop request, and from the last growth of the final checkpoint, until ranks are ended."""
    directives: tuple[str, ...] = ()
    """More directives of the job script under pbs, lsf, gridengine and flux, as written there: '-pe mpi 8'."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What the job asks of Slurm."""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    """What the job asks of Kubernetes."""

    def failures_allowed(self, in_job: bool) -> int:
        """``max_failures``, or its default: outside a job, a plain command may not be meant to run twice."""
        default = 0 if self.command and not in_job else 3
        return default if self.max_failures is None else self.max_failures

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts and (len(set(self.hosts)) < len(self.hosts) or self.spare_nodes >= len(self.hosts)):
            raise UserError("launch.hosts names a host twice, or only spare ones", "name each host once")
        if self.engine and (self.engine == "hosts") != bool(self.hosts):
            raise UserError(f"launch.engine is {self.engine}, launch.hosts {list(self.hosts)}", "correct one of them")
        if self.stage_environment and self.slurm.wrap:
            what = "launch.stage_environment has no use with launch.slurm.wrap"
            raise WrongValue("launch.stage_environment", what, "leave it out: an image is one file")
        if "{host}" not in self.remote_shell:
            raise UserError("launch.remote_shell does not say where", "write {host} where the name of a host belongs")


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts in sections, mappings and lists, each with the key of the run file that it belongs to."""
    if is_dataclass(value):
        for name, part in vars(value).items():
            yield from texts_of(part, f"{key}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple, dict)):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from texts_of(part, key)
    elif isinstance(value, str):
        yield key, value


class Config(Section, key=""):
    """One run."""

    name: str
    """Name of the run: letters, digits, dot, dash, underscore. The run folder is runs/<name>."""
    task: Decisive[str] = ""
    """package.module:function or path/file.py:function that returns a TorchTask or a KerasTask."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, how large, and in which precision."""
    run_dir: str | None = None
    """Run folder; by default runs/<name>."""
    seed: Decisive[Annotated[int, Range(least=0, most=LARGEST_SEED)]] = 0
    """Seed of everything random in the run."""
    task_args: Decisive[dict[str, Any]] = field(default_factory=dict)
    """Arguments of the task function."""
    optimizer: Decisive[OptimizerConfig] = field(default_factory=OptimizerConfig)
    """The optimizer, if the task has none."""
    schedule: Decisive[ScheduleConfig] = field(default_factory=ScheduleConfig)
    """The learning rate."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is partitioned over ranks."""
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    """How gradients are averaged."""
    sync: Decisive[SyncConfig] = field(default_factory=SyncConfig)
    """When ranks exchange what they have learned."""
    data: DataConfig = field(default_factory=DataConfig)
    """How samples are ordered and loaded."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are written."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """What to monitor."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """Where progress is reported."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """How ranks are started."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not NAME.fullmatch(self.name):
            fix = "use up to 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"
            raise WrongValue("name", f"name is {self.name!r}", fix)
        for pair in ONE_OF if self.task else ONE_OF[:1]:
            pair.check(self)
        if self.task and not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", self.task):
            fix = "write package.module:function or path/file.py:function"
            raise WrongValue("task", f"task is {self.task!r}", fix)
        for key, text in texts_of(self):
            if key != "launch.env" and holds_credentials(text):
                raise WrongValue(key, f"{key} contains credentials in an address", KEPT_BY_LIBRARIES)
        require_whole_groups(self.parallel.tensor, self.launch.ranks_per_node)
        refuse(self.features())

    def features(self) -> dict[Feature, Any]:
        """What the run file uses that does not work with everything."""
        train, schedule, checkpoint = self.train, self.schedule, self.checkpoint
        given = {
            Feature.ACCUMULATE: train.accumulate > 1 and train.accumulate,
            Feature.BEST: checkpoint.enabled and checkpoint.best_metric,
            Feature.BF16: train.precision == "bf16",
            Feature.CHANNELS_LAST: train.channels_last,
            Feature.CLIP: train.clip_norm,
            Feature.COMPILE: train.compile,
            Feature.COMPILE_MODE: train.compile_mode != "default" and train.compile_mode,
            Feature.CUDNN_BENCHMARK: train.cudnn_benchmark,
            Feature.CYCLE_EPOCHS: schedule.cycle_epochs,
            Feature.EARLY_STOP: train.early_stop.metric,
            Feature.EMA: train.ema_decay,
            Feature.EPOCHS: train.epochs,
            Feature.EXPONENTIAL: schedule.kind == "exponential",
            Feature.FP16: train.precision == "fp16",
            Feature.INITIAL_WEIGHTS: checkpoint.init_from,
            Feature.LOCAL_SYNC: self.sync.kind == "local",
            Feature.NO_CHECKPOINTS: not checkpoint.enabled,
            Feature.NO_EVALUATIONS: train.eval_every_epochs is None and train.eval_every_steps is None,
            Feature.ONE_CYCLE: schedule.kind == "one_cycle",
            Feature.PIPELINE: self.parallel.pipeline > 1 and self.parallel.pipeline,
            Feature.PLATEAU: schedule.kind == "plateau" and schedule.plateau.metric,
            Feature.RECOMPUTE: train.recompute,
            Feature.SCHEDULE: schedule != ScheduleConfig(),
            Feature.STEP_EPOCHS: schedule.step_epochs,
            Feature.SYNC_BATCHNORM: train.sync_batchnorm,
            Feature.TENSOR: self.parallel.tensor > 1 and self.parallel.tensor,
            Feature.WARMUP: schedule.warmup_steps or schedule.warmup_epochs,
            Feature.WARMUP_EPOCHS: schedule.warmup_epochs,
            Feature.WORKERS: self.data.workers,
            **{feature: self.parallel.shard == word for word, feature in SHARDS.items()},
        }
        return used(given) | self.reduce.features()


PARTS = {name: kind for name, kind in get_type_hints(Config).items() if getattr(kind, "_key", "")}
"""Sections of the run file by name."""
DECISIVE = tuple(key for section in Section.__subclasses__() for key in section._decisive)
"""Keys that change what is computed, dotted; a section for all in it."""


@dataclass(frozen=True)
class OneOf:
    """Two keys that exclude each other. One given on the command line overrides the other in the run file."""

    first: str
    second: str
    required: bool = True
    """Whether one of them must be given."""
    fix: str = ""
    """Advice; by default to give one of them."""

    def check(self, config: Config) -> None:
        """Raises WrongValue if both are given, or neither and one is required."""
        given = [is_given(operator.attrgetter(key)(config)) for key in (self.first, self.second)]
        if all(given) or (self.required and not any(given)):
            what = f"{self.first} and {self.second} are both {'given' if all(given) else 'missing'}"
            fix = self.fix or f"give {'exactly ' if self.required else ''}one of {self.first} and {self.second}"
            raise WrongValue(self.first, what, fix)


def is_given(value: object) -> bool:
    """Whether a key has a value: 0 is one."""
    return value not in (None, "", (), [])


ONE_OF = (
    OneOf(
        "task",
        "launch.command",
        fix="give task: package.module:function for a training run, or launch.command for a plain command",
    ),
    OneOf("train.epochs", "train.steps"),
    OneOf("train.global_batch", "train.batch_per_rank"),
    OneOf("schedule.warmup_steps", "schedule.warmup_epochs", required=False),
)
"""All pairs of keys that exclude each other; of a plain command the first one only."""


def require_whole_groups(tensor: int, ranks_per_node: int | None) -> None:
    """Raises WrongValue if tensor groups would span several nodes."""
    if ranks_per_node is not None and ranks_per_node % tensor:
        raise WrongValue(
            "parallel.tensor",
            f"parallel.tensor is {tensor}, which does not divide launch.ranks_per_node, {ranks_per_node}: ranks that "
            "share a layer would be on different nodes",
            "choose a parallel.tensor that divides launch.ranks_per_node",
        )


def at_least(key: str, value: float | None, least: float) -> None:
    """Raises WrongValue if a given value is below the least one, or not a number (NaN)."""
    if value is not None and not value >= least:
        raise WrongValue(key, f"{key} is {value}", f"give {least} or more")
