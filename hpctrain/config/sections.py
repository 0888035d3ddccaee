"""The run file: its sections, each a frozen dataclass, and what they must have in common.

The files of keys are the only place where defaults live; other rooms import their names from here. Units are part of
the names (``_steps``, ``_s``, ``_bytes``). Every field has a docstring: they make ``--help`` and the reference page.
Ranges of numbers are part of their types, other checks are in ``__post_init__``; features that do not go together are
in ``combinations``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, get_type_hints

from hpctrain.config.combinations import refuse
from hpctrain.config.exchange_keys import SHARDS, ParallelConfig, ReduceConfig, SyncConfig
from hpctrain.config.features import Feature, stated_by, used
from hpctrain.config.launch_keys import Engine, LaunchConfig, SlurmConfig
from hpctrain.config.section import Decisive, NotNegative, Range, Section, WrongValue, is_given
from hpctrain.config.storage_keys import (
    CheckpointConfig,
    DataConfig,
    RunDirTierConfig,
    StoreTierConfig,
    TierConfig,
    TiersConfig,
    require_store,
)
from hpctrain.config.training_keys import (
    OPTIMIZERS,
    EarlyStopConfig,
    OptimizerConfig,
    PlateauConfig,
    ScheduleConfig,
    TrainConfig,
)
from hpctrain.config.values import KEPT_BY_LIBRARIES, holds_credentials
from hpctrain.config.watching_keys import MonitorConfig, ProfileConfig, TrackConfig

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LARGEST_SEED = 2**64 - 1
"""What the generators of data order and frameworks take."""


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
        tensor = self.parallel.tensor
        ranks_per_node = self.launch.ranks_per_node
        if ranks_per_node is not None and ranks_per_node % tensor:
            raise WrongValue(
                "parallel.tensor",
                f"parallel.tensor is {tensor}, which does not divide launch.ranks_per_node, {ranks_per_node}: ranks "
                "that share a layer would be on different nodes",
                "choose a parallel.tensor that divides launch.ranks_per_node",
            )
        refuse(self.features())

    def features(self) -> dict[Feature, Any]:
        """What the run file uses that does not work with everything."""
        train = self.train
        schedule = self.schedule
        checkpoint = self.checkpoint
        more_than_a_key = {
            Feature.BEST: checkpoint.enabled and checkpoint.best_metric,
            Feature.NO_CHECKPOINTS: not checkpoint.enabled,
            Feature.NO_EVALUATIONS: train.eval_every_epochs is None and train.eval_every_steps is None,
            Feature.PLATEAU: schedule.kind == "plateau" and schedule.plateau.metric,
            Feature.SCHEDULE: schedule != ScheduleConfig(),
            Feature.WARMUP: schedule.warmup_steps or schedule.warmup_epochs,
        }
        return used(stated_by(vars(self)) | more_than_a_key)


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
