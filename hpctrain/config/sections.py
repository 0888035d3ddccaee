"""The run file: one frozen dataclass a section, and the only place where defaults live.

Units are part of the names (``_steps``, ``_s``, ``_bytes``). Every field has a docstring: they make ``--help`` and the
reference page. Checks of values are in ``__post_init__``; what does not go together stands in ``combinations``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from hpctrain.config.combinations import Feature, refuse, used
from hpctrain.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LARGEST_SEED = 2**64 - 1
"""What the generators of data order and frameworks take."""
MOST_EPOCHS = 10**6
"""Beyond what anybody means."""


class WrongValue(UserError):
    """A key of the run file has a value that it does not take."""

    def __init__(self, key: str, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.key = key
        """The key, dotted; of several that do not go together, the first."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.what, self.fix)


@dataclass(frozen=True)
class EarlyStopConfig:
    """Stop when a validation metric no longer improves."""

    metric: str | None = None
    """Validation metric that is watched, such as loss; none: no early stopping."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    patience: int = 3
    """Evaluations without improvement before the run ends."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""

    def __post_init__(self) -> None:
        at_least("train.early_stop.patience", self.patience, 1)
        at_least("train.early_stop.min_delta", self.min_delta, 0)


@dataclass(frozen=True)
class TrainConfig:
    """How long, how large, and in which precision."""

    epochs: int | None = None
    """Passes over the training data. Exactly one of epochs and steps."""
    steps: int | None = None
    """Optimizer updates. Exactly one of epochs and steps."""
    global_batch: int | None = None
    """Samples of one update over all ranks. Exactly one of global_batch and batch_per_rank."""
    batch_per_rank: int | None = None
    """Samples of one update on each rank: the global batch grows with the number of ranks."""
    accumulate: int = 1
    """Micro-batches that one update is computed in; gradients are exchanged once an update."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward; parameters and gradients stay fp32 (fp16 with loss scaling)."""
    clip_norm: float | None = None
    """Largest global L2 norm of the averaged gradient; larger ones are scaled down to it."""
    ema_decay: float | None = None
    """Decay of the exponential moving average of the weights; none if not given. Evaluation then uses the average."""
    eval_every_epochs: int | None = 1
    """Evaluate every N epochs."""
    eval_every_steps: int | None = None
    """Evaluate every N steps, too."""
    eval_batch_per_rank: int | None = None
    """Samples of one validation batch on each rank; by default as many as in a training micro-batch."""
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    """Stop when a validation metric no longer improves."""
    compile: bool = False
    """PyTorch: torch.compile the model; Keras: let XLA compile the step."""
    sync_batchnorm: bool = False
    """BatchNorm normalises over the samples of all ranks, not of each one's part: N ranks train as one does."""
    recompute: tuple[str, ...] = ()
    """PyTorch: patterns of layers, such as blocks.* or * for all, whose activations are not kept for the backward pass
    but computed again in it: less memory, more time, the same numbers."""
    channels_last: bool = False
    """PyTorch: keep 4-dimensional tensors in channels-last memory format."""
    threads: int | None = None
    """Compute threads of each rank; by default the launcher's share of the node's cores."""

    def __post_init__(self) -> None:
        for key in ("epochs", "steps", "global_batch", "batch_per_rank", "accumulate", "eval_every_epochs"):
            at_least(f"train.{key}", getattr(self, key), 1)
        at_least("train.eval_batch_per_rank", self.eval_batch_per_rank, 1)
        at_least("train.eval_every_steps", self.eval_every_steps, 1)
        at_least("train.threads", self.threads, 1)
        above("train.clip_norm", self.clip_norm, 0)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            key = "train.ema_decay"
            raise WrongValue(key, f"{key} is {self.ema_decay}", "give a number between 0 and 1, such as 0.999")


@dataclass(frozen=True)
class PlateauConfig:
    """Lower the learning rate when a validation metric no longer improves."""

    metric: str = "loss"
    """Validation metric that schedule.kind: plateau watches."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    patience: int = 3
    """Evaluations without improvement before the rate is lowered."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""
    factor: float = 0.1
    """What the rate is multiplied by each time, down to final_factor at the least."""
    cooldown: int = 0
    """Evaluations after a lowering that are not counted."""

    def __post_init__(self) -> None:
        at_least("schedule.plateau.patience", self.patience, 1)
        at_least("schedule.plateau.min_delta", self.min_delta, 0)
        above("schedule.plateau.factor", self.factor, 0)
        at_most("schedule.plateau.factor", self.factor, 1)
        at_least("schedule.plateau.cooldown", self.cooldown, 0)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a factor on the optimizer's own."""

    kind: Literal[
        "constant",
        "linear",
        "cosine",
        "step",
        "polynomial",
        "exponential",
        "restarts",
        "one_cycle",
        "wsd",
        "plateau",
    ] = "constant"
    """Shape after the warm-up. linear, cosine, polynomial, one_cycle and wsd (warm-up, stable, decay) fall to
    final_factor at the last step; the others do not depend on the run's length."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Growth of the learning rate with the number of ranks (Goyal et al. 2017: linear)."""
    base_batch: int | None = None
    """Global batch for which the optimizer's learning rate is meant; by default one rank's batch."""
    warmup_steps: int | None = None
    """Steps over which the rate climbs to the full one, from the unscaled one or, if none is scaled, from 0. At most
    one of the two warm-ups."""
    warmup_epochs: float | None = None
    """The same, in epochs."""
    final_factor: float = 0.0
    """Where the falling kinds end (what a step after the last one would have), each cycle of restarts, and plateau."""
    power: float = 2.0
    """Exponent of polynomial."""
    step_epochs: tuple[int, ...] = ()
    """Epochs after which a step schedule multiplies the rate by step_factor."""
    step_factor: float = 0.1
    """What step multiplies the rate by at each of step_epochs."""
    decay_factor: float = 0.95
    """What exponential multiplies the rate by in each epoch, in equal parts each step."""
    cycle_epochs: float | None = None
    """Length of the first cycle of restarts, each of which falls as a cosine (Loshchilov and Hutter 2017)."""
    cycle_growth: float = 1.0
    """Each cycle of restarts is this many times as long as the one before."""
    start_factor: float = 0.04
    """Where one_cycle begins (Smith and Topin 2018)."""
    climb_share: float = 0.3
    """Share of all steps in which one_cycle climbs to the full rate."""
    decay_share: float = 0.2
    """Share of all steps, the last ones, in which wsd falls, by equal steps."""
    plateau: PlateauConfig = field(default_factory=PlateauConfig)
    """Lower the rate when a validation metric no longer improves."""

    def __post_init__(self) -> None:
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            both = "both schedule.warmup_steps and schedule.warmup_epochs are given"
            raise WrongValue("schedule.warmup_steps", both, "keep one of them")
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        at_least("schedule.warmup_epochs", self.warmup_epochs, 0)
        at_most("schedule.warmup_epochs", self.warmup_epochs, MOST_EPOCHS)
        at_least("schedule.base_batch", self.base_batch, 1)
        at_least("schedule.final_factor", self.final_factor, 0)
        above("schedule.power", self.power, 0)
        above("schedule.step_factor", self.step_factor, 0)
        if self.kind == "step" and not self.step_epochs:
            empty = "schedule.kind is step but schedule.step_epochs is empty"
            raise WrongValue("schedule.kind", empty, "name epochs, such as [30, 60]")
        above("schedule.decay_factor", self.decay_factor, 0)
        above("schedule.cycle_epochs", self.cycle_epochs, 0)
        at_most("schedule.cycle_epochs", self.cycle_epochs, MOST_EPOCHS)
        at_least("schedule.cycle_growth", self.cycle_growth, 1)
        at_least("schedule.start_factor", self.start_factor, 0)
        for key in ("climb_share", "decay_share"):
            above(f"schedule.{key}", getattr(self, key), 0)
            at_most(f"schedule.{key}", getattr(self, key), 1)
        if self.kind == "restarts" and self.cycle_epochs is None:
            empty = "schedule.kind is restarts but schedule.cycle_epochs is missing"
            raise WrongValue("schedule.kind", empty, "give the length of the first cycle, such as 10")


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is shared out among ranks, beside the data."""

    tensor: int = 1
    """PyTorch: ranks, on one node, that share out the layers which the task names in tensor=. Each such group trains on
    its own samples."""
    pipeline: int = 1
    """PyTorch: stages that the layers of the model are shared out among, one after the other: of layers= of the task,
    or of nn.Sequential. The micro-batches of train.accumulate follow each other through them."""
    shard: Literal["none", "optimizer", "parameters", "tables"] = "none"
    """What each rank holds only a part of. optimizer: the optimizer's state (ZeRO-1); each rank updates its rows of
    the parameters, and all get them. parameters (PyTorch): the parameters, too, and their gradients (FSDP2); a layer
    is whole while it computes. tables (PyTorch): the rows of the tables that the task marks in tensor= by vocabulary,
    and their state; vectors and gradients go from rank to rank. The numbers and checkpoints are the same."""

    def __post_init__(self) -> None:
        at_least("parallel.tensor", self.tensor, 1)
        at_least("parallel.pipeline", self.pipeline, 1)


@dataclass(frozen=True)
class ReduceConfig:
    """How gradients are averaged over the ranks."""

    kind: Literal["auto", "horovod", "mpi", "none"] = "auto"
    """The reducer; auto measures the candidates before the first update and keeps the fastest."""
    compression: Literal["none", "fp16", "bf16", "auto"] = "none"
    """What travels in place of fp32; auto lets the measurement choose between none and fp16."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Send a bucket as soon as its gradients are ready (on), or everything after backward (off)."""
    bucket_bytes: int = 8 * 2**20
    """Size of a bucket if buckets are sent during backward."""
    sparse: Literal["auto", "densify", "refuse"] = "auto"
    """Sparse gradients of embeddings: auto lets rows travel alone where that changes no number, densify makes them
    dense, refuse names them and ends the run."""
    verify_every_steps: int | None = None
    """Compare a hash of the weights over all ranks every N steps, and fail on a difference."""

    def __post_init__(self) -> None:
        at_least("reduce.bucket_bytes", self.bucket_bytes, 1024)
        at_least("reduce.verify_every_steps", self.verify_every_steps, 1)

    def features(self) -> dict[Feature, Any]:
        """What of this section does not go with everything."""
        given = {
            Feature.BF16_SUMS: self.compression == "bf16",
            Feature.FP16_SUMS: self.compression == "fp16",
            Feature.DENSIFY: self.sparse == "densify",
            Feature.HOROVOD: self.kind == "horovod",
            Feature.NO_REDUCER: self.kind == "none",
            Feature.OVERLAP: self.overlap == "on",
            Feature.VERIFY: self.verify_every_steps,
        }
        return used(given)


@dataclass(frozen=True)
class DataConfig:
    """How samples are ordered and brought to the ranks."""

    shuffle: Literal["full", "block", "none"] = "full"
    """full: a permutation of all samples each epoch; block: of blocks, and within groups of them, for data that does
    not fit into memory."""
    block_samples: int = 1024
    """Samples in a block, for shuffle: block."""
    drop_last: bool = False
    """Leave out the last, smaller global batch of an epoch."""
    prefetch_batches: int = 2
    """Batches that each rank keeps ready; 0 reads within the step."""
    workers: int = 0
    """Worker processes for heavy transforms; 0 uses one thread."""
    allow_outside: tuple[str, ...] = ()
    """Folders that links, virtual sources and external storage of HDF5 files may lead to, besides the data's own."""

    def __post_init__(self) -> None:
        at_least("data.block_samples", self.block_samples, 1)
        at_least("data.prefetch_batches", self.prefetch_batches, 0)
        at_least("data.workers", self.workers, 0)


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, how, and which are kept."""

    enabled: bool = True
    """Write checkpoints at all."""
    every_steps: int | None = None
    """Save every N steps."""
    every_minutes: float | None = None
    """Save every N minutes."""
    every_epochs: int | None = None
    """Save every N epochs."""
    interval: Literal["auto", "none"] = "auto"
    """auto: if nothing above is given, Young/Daly's interval from the measured cost and mtbf_hours."""
    mtbf_hours: float = 24.0
    """Mean time between failures of the whole job, for interval: auto."""
    overhead_budget: float = 0.035
    """Largest share of the run's time that automatic checkpoints may cost."""
    best_metric: str | None = None
    """Save whenever this validation metric improves, and keep that checkpoint."""
    best_mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    keep_last: int = 3
    """Newest checkpoints that are kept."""
    keep_every_steps: int | None = None
    """Keep for ever the first checkpoint at or after each multiple of this many steps."""
    mode: Literal["async", "sync"] = "async"
    """async: write in the background while training continues."""
    writers: Literal["all", "node", "one"] = "all"
    """Which ranks write replicated state: all in parts, one a node in parts, or rank 0 alone."""
    verify_replicated: bool = False
    """Check at each save that what is declared replicated is equal on all ranks (debugging)."""
    init_from: str | None = None
    """What the weights start from (fine-tuning): run folder, checkpoint, folder of a Hugging Face model, or a file:
    .safetensors, .pt, .pth, .bin, .ckpt, or .weights.h5 of Keras."""
    init_rename: dict[str, str] = field(default_factory=dict)
    """Beginnings of names in init_from, and what they are in the model, such as {"encoder.": "model.encoder."}."""
    init_missing: tuple[str, ...] = ()
    """Patterns of the model's weights, such as head.*, that keep their initial values if init_from lacks them or has
    them in another shape. Others are refused."""
    accept: tuple[str, ...] = ()
    """Keys that may differ from those of the checkpoint that is resumed, though the result depends on them, such as
    train.epochs, or state.NAME for state that only the task or only the checkpoint has. On the command line: --accept
    KEY."""

    def __post_init__(self) -> None:
        for key in ("every_steps", "every_epochs", "keep_last", "keep_every_steps"):
            at_least(f"checkpoint.{key}", getattr(self, key), 1)
        above("checkpoint.every_minutes", self.every_minutes, 0)
        above("checkpoint.mtbf_hours", self.mtbf_hours, 0)
        above("checkpoint.overhead_budget", self.overhead_budget, 0)


@dataclass(frozen=True)
class MonitorConfig:
    """What is watched during the run."""

    enabled: bool = True
    """Watch for stragglers and hangs."""
    window_steps: int = 32
    """Steps whose medians are compared."""
    hang_s: float | None = None
    """Seconds without a finished step that count as a hang (first step: at least 900); by default as measured."""
    on_hang: Literal["report", "abort"] = "abort"
    """abort ends the attempt so that it can be resumed from the last checkpoint."""
    action: Literal["report", "exclude_on_requeue"] = "report"
    """exclude_on_requeue leaves out a host whose slowness is confirmed as its own at the next requeue."""
    exclude_hours: float = 24.0
    """How long an excluded host, or one that breaks attempts, stays excluded."""
    host_interval_s: float = 5.0
    """Seconds between readings of the hosts' counters."""

    def __post_init__(self) -> None:
        at_least("monitor.window_steps", self.window_steps, 4)
        above("monitor.hang_s", self.hang_s, 0)
        above("monitor.exclude_hours", self.exclude_hours, 0)
        above("monitor.host_interval_s", self.host_interval_s, 0)


@dataclass(frozen=True)
class ProfileConfig:
    """Record what the framework does in some steps: torch.profiler or tf.profiler."""

    first_step: int | None = None
    """First step that is profiled; none: no profile. Traces go to <run folder>/profile."""
    last_step: int | None = None
    """Last step that is profiled; by default four after the first."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that are profiled."""

    def __post_init__(self) -> None:
        at_least("track.profile.first_step", self.first_step, 1)
        if self.last_step is not None and self.last_step < (self.first_step or self.last_step + 1):
            what = f"track.profile.last_step is {self.last_step} and first_step {self.first_step}"
            raise WrongValue("track.profile.last_step", what, "give first_step, and a last_step that is not before it")
        for rank in self.ranks:
            at_least("track.profile.ranks", rank, 0)


@dataclass(frozen=True)
class TrackConfig:
    """Where progress is reported."""

    every_steps: int = 10
    """Steps of one reported interval."""
    tensorboard: bool = False
    """Write TensorBoard scalars to <run folder>/tensorboard."""
    mlflow: str | None = None
    """MLflow tracking URI (a folder or a server)."""
    mlflow_experiment: str = "hpctrain"
    """MLflow experiment that the run belongs to."""
    prometheus: str | None = None
    """Text file for a node exporter's textfile collector."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Record what the framework does in some steps."""

    def __post_init__(self) -> None:
        at_least("track.every_steps", self.every_steps, 1)


@dataclass(frozen=True)
class SlurmConfig:
    """What the job asks of Slurm. Empty fields are left to the site profile, then to the site."""

    profile: str = "generic"
    """Site profile: a name, or a path to a TOML file."""
    account: str | None = None
    """Account that is charged."""
    partition: str | None = None
    """Partition, or several with commas."""
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
    """Shortest limit that is acceptable, if that starts the job earlier."""
    memory: str | None = None
    """Memory: '4G' for each node, '2G/cpu' for each core, '16G/gpu' for each GPU, '0' for all of the node."""
    exclusive: bool | None = None
    """Share the nodes with no other job."""
    gpus_per_node: int | None = None
    """GPUs of each node; one rank each unless launch.ranks_per_node says otherwise."""
    gpu_type: str | None = None
    """GPU model if the site wants it named."""
    gpu_request: Literal["gres", "gpus-per-node", "gpus-per-task"] | None = None
    """How the site wants GPUs asked for."""
    cpus_per_rank: int | None = None
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
    """Words before the command of each rank: apptainer exec --nv image.sif. The image needs hpctrain."""
    scratch: str | None = None
    """Node-local folder that stage-in copies to; $NAME at its beginning is read on the node."""
    exclude: tuple[str, ...] = ()
    """Hosts that are not to be used."""
    bad_nodes: Literal["run", "shared", "off"] = "run"
    """Leave out nodes that break attempts: found by this run, by any of your runs that say shared, or none."""
    requeue: bool | None = None
    """Requeue the job when it was stopped before its end; false if the site forbids it (see submit --chain)."""
    max_requeues: int = 20
    """Starts of the job beyond the first, whoever requeued it, after which the run ends; resume resets the count."""
    signal_s: int | None = None
    """Seconds before the time limit at which the job is asked to stop; by default from measured steps and saves."""
    extra: tuple[str, ...] = ()
    """More directives, as written in a script: --nice=100."""
    skip: tuple[str, ...] = ()
    """Directives that are left out, by name: --mem."""
    replace: dict[str, str] = field(default_factory=dict)
    """Lines that replace directives, by name: {--gres: --gres=gpu:v100:4}."""

    def __post_init__(self) -> None:
        at_least("launch.slurm.gpus_per_node", self.gpus_per_node, 1)
        at_least("launch.slurm.cpus_per_rank", self.cpus_per_rank, 1)
        at_least("launch.slurm.max_requeues", self.max_requeues, 0)
        at_least("launch.slurm.signal_s", self.signal_s, 1)


@dataclass(frozen=True)
class LaunchConfig:
    """How ranks are started."""

    nodes: int = 1
    """Nodes."""
    ranks_per_node: int | None = None
    """Ranks on each node; by default launch.slurm.gpus_per_node, else one."""
    launcher: Literal["auto", "srun", "mpirun"] = "auto"
    """What starts the ranks inside a Slurm job."""
    command: tuple[str, ...] = ()
    """A plain command to run on every rank in place of our trainer. Exit code 75 means: run me again."""
    convention: Literal["auto", "torch", "tensorflow", "mpi"] = "auto"
    """What tells a plain command its rank: RANK, MASTER_ADDR and so on as by torchrun, TF_CONFIG, both, or only MPI."""
    stop_signal: Literal["TERM", "USR1", "USR2", "INT"] = "TERM"
    """Signal that asks a plain command to stop."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for every rank."""
    modules: tuple[str, ...] = ()
    """Environment modules that the job loads."""
    setup: tuple[str, ...] = ()
    """Shell lines run in the job before the launch, unchanged."""
    stage_in: tuple[str, ...] = ()
    """Files and folders copied to node-local scratch, once a node; task_args that name one get the copy's path."""
    stage_environment: bool | None = None
    """Copy the Python environment there, too; by default on 32 nodes or more: imports from a shared disk are slow."""
    preflight: bool = True
    """Check ranks, hosts, devices, folders and one small allreduce before the launch, in a Slurm job."""
    max_failures: int = 3
    """Failures in a row without a new checkpoint after which the run ends; lost nodes and preemption do not count."""
    stop_grace_s: float = 60.0
    """Seconds from a stop request, and from the last growth of the final checkpoint, until ranks are ended."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What the job asks of Slurm."""

    def __post_init__(self) -> None:
        at_least("launch.nodes", self.nodes, 1)
        at_least("launch.ranks_per_node", self.ranks_per_node, 1)
        at_least("launch.max_failures", self.max_failures, 1)
        above("launch.stop_grace_s", self.stop_grace_s, 0)


@dataclass(frozen=True)
class Config:
    """One run."""

    name: str
    """Name of the run: letters, digits, dot, dash, underscore. The run folder is runs/<name>."""
    task: str = ""
    """package.module:function or path/file.py:function that returns a TorchTask or a KerasTask."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, how large, and in which precision."""
    run_dir: str | None = None
    """Run folder; by default runs/<name>."""
    seed: int = 0
    """Seed of everything random in the run."""
    task_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task function."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is shared out."""
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    """How gradients are averaged."""
    data: DataConfig = field(default_factory=DataConfig)
    """How samples are ordered and brought."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are written."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """What is watched."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """Where progress is reported."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """How ranks are started."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            fix = "use letters, digits, '.', '_' and '-', beginning with a letter or digit"
            raise WrongValue("name", f"name is {self.name!r}", fix)
        if bool(self.task) == bool(self.launch.command):
            raise WrongValue(
                "task",
                "task and launch.command are " + ("both given" if self.task else "both missing"),
                "give task: package.module:function for a training run, or launch.command for a plain command",
            )
        if self.task and not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", self.task):
            fix = "write package.module:function or path/file.py:function"
            raise WrongValue("task", f"task is {self.task!r}", fix)
        if self.task:
            train = self.train
            exactly_one("train.epochs", train.epochs, "train.steps", train.steps)
            exactly_one("train.global_batch", train.global_batch, "train.batch_per_rank", train.batch_per_rank)
        at_least("seed", self.seed, 0)
        at_most("seed", self.seed, LARGEST_SEED)
        require_whole_groups(self.parallel.tensor, self.launch.ranks_per_node)
        refuse(self.features())

    def features(self) -> dict[Feature, Any]:
        """What the run file uses that does not go with everything."""
        train, schedule, checkpoint, launch = self.train, self.schedule, self.checkpoint, self.launch
        given = {
            Feature.ACCUMULATE: train.accumulate > 1 and train.accumulate,
            Feature.BEST: checkpoint.enabled and checkpoint.best_metric,
            Feature.BF16: train.precision == "bf16",
            Feature.CHANNELS_LAST: train.channels_last,
            Feature.CLIP: train.clip_norm,
            Feature.COMPILE: train.compile,
            Feature.CYCLE_EPOCHS: schedule.cycle_epochs,
            Feature.EARLY_STOP: train.early_stop.metric,
            Feature.EMA: train.ema_decay,
            Feature.EPOCHS: train.epochs,
            Feature.EXPONENTIAL: schedule.kind == "exponential",
            Feature.FP16: train.precision == "fp16",
            Feature.INITIAL_WEIGHTS: checkpoint.init_from,
            Feature.NO_CHECKPOINTS: not checkpoint.enabled,
            Feature.NO_EVALUATIONS: train.eval_every_epochs is None and train.eval_every_steps is None,
            Feature.ONE_CYCLE: schedule.kind == "one_cycle",
            Feature.PIPELINE: self.parallel.pipeline > 1 and self.parallel.pipeline,
            Feature.PLATEAU: schedule.kind == "plateau" and schedule.plateau.metric,
            Feature.RECOMPUTE: train.recompute,
            Feature.SCHEDULE: schedule != ScheduleConfig(),
            Feature.SHARD: self.parallel.shard == "optimizer",
            Feature.SHARD_PARAMETERS: self.parallel.shard == "parameters",
            Feature.SHARD_TABLES: self.parallel.shard == "tables",
            Feature.STAGED_ENVIRONMENT: launch.stage_environment,
            Feature.STEP_EPOCHS: schedule.step_epochs,
            Feature.SYNC_BATCHNORM: train.sync_batchnorm,
            Feature.TENSOR: self.parallel.tensor > 1 and self.parallel.tensor,
            Feature.WARMUP: schedule.warmup_steps or schedule.warmup_epochs,
            Feature.WARMUP_EPOCHS: schedule.warmup_epochs,
            Feature.WORKERS: self.data.workers,
            Feature.WRAP: launch.slurm.wrap,
        }
        return used(given) | self.reduce.features()


def require_whole_groups(tensor: int, ranks_per_node: int | None) -> None:
    """Raises WrongValue if tensor groups would lie on several nodes."""
    if ranks_per_node is not None and ranks_per_node % tensor:
        raise WrongValue(
            "parallel.tensor",
            f"parallel.tensor is {tensor}, which does not divide launch.ranks_per_node, {ranks_per_node}: ranks that "
            "share a layer would lie on different nodes",
            "choose a parallel.tensor that divides launch.ranks_per_node",
        )


def exactly_one(first: str, first_value: object, second: str, second_value: object) -> None:
    """Raises WrongValue unless one of two values is given."""
    if (first_value is None) == (second_value is None):
        both = "both given" if first_value is not None else "both missing"
        raise WrongValue(first, f"{first} and {second} are {both}", f"give exactly one of {first} and {second}")


def at_least(key: str, value: float | None, least: float) -> None:
    """Raises WrongValue if a given value is below the least one, or not a number (NaN)."""
    if value is not None and not value >= least:
        raise WrongValue(key, f"{key} is {value}", f"give {least} or more")


def above(key: str, value: float | None, bound: float) -> None:
    """Raises WrongValue if a given value is not above the bound, or not a number (NaN)."""
    if value is not None and not value > bound:
        raise WrongValue(key, f"{key} is {value}", f"give a number above {bound}")


def at_most(key: str, value: float | None, most: float) -> None:
    """Raises WrongValue if a given value is above the largest one."""
    if value is not None and value > most:
        raise WrongValue(key, f"{key} is {value}", f"give {most} or less")
