"""Keys of what is read and kept: training data, checkpoints, and where copies of them are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from hpctrain.config.section import AboveZero, Decisive, Natural, Positive, Range, Section
from hpctrain.config.values import refuse_credentials
from hpctrain.errors import UserError

STORES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")
"""Schemes of the URLs of object stores that checkpoints are copied to."""


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
            Range(least=1).check(f"checkpoint.tiers.{name}.every_steps", None if steps == "auto" else steps)
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
    """Source of the initial weights (fine-tuning): a run folder, checkpoint, Hugging Face model folder, folder of
    torch.distributed.checkpoint, or a file: .safetensors, .pt, .pth, .bin, .ckpt, or Keras' .weights.h5."""
    init_rename: dict[str, str] = field(default_factory=dict)
    """Prefixes of names in init_from, and their replacements in the model, such as {"encoder.": "model.encoder."}."""
    init_missing: tuple[str, ...] = ()
    """Patterns of the model's weights, such as head.*, that keep their initial values if init_from lacks them or has
    them in another shape. For other weights that is an error."""
    frozen: Literal["saved", "source"] = "saved"
    """Where frozen weights are that init_from gave: saved with the rest, or only in their source, which a resume and an
    export then need."""
    accept: tuple[str, ...] = ()
    """Keys that may differ from those of the checkpoint that is resumed, though the result depends on them, such as
    train.epochs; or state.NAME or model.NAME for state or tensors of the model that only the task or only the
    checkpoint has. On the command line: --accept KEY."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiers.run_dir.every_steps and (self.every_steps or self.every_minutes or self.every_epochs):
            what = "checkpoint.tiers.run_dir.every_steps and another checkpoint.every_... are both given"
            raise UserError(what, "keep one of them")
        place = self.init_from or "null"
        if self.frozen == "source" and (place == "null" or place.endswith(".weights.h5")):
            fix = "set init_from to a folder, a checkpoint, or a .safetensors or PyTorch file; or leave frozen out"
            raise UserError(f"checkpoint.frozen is source, and checkpoint.init_from is {place}", fix)
