"""Keys of how a model is trained: length, batches and precision, the optimizer, the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from hpctrain.config.section import (
    AboveZero,
    Decisive,
    Natural,
    NotNegative,
    Positive,
    Range,
    Section,
    Share,
    WrongValue,
    is_given,
)

MOST_EPOCHS = 10**6
"""Larger numbers are mistakes."""


class EarlyStopConfig(Section, key="train.early_stop"):
    """Stop when a validation metric no longer improves."""

    metric: str | None = None
    """Validation metric to watch, such as loss; by default no early stopping."""
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
    metrics: tuple[str, ...] = ()
    """Metrics of the task to compute on training batches too and to report next to the loss, such as [accuracy]. They
    see the outputs that the loss gets, so they cost no forward pass."""
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
    recompute_keeps: Literal["inputs", "products"] = "inputs"
    """What layers of train.recompute keep. products: besides their inputs, the results of matrix products, convolutions
    and attention, so that only what takes little time is computed again (selective activation checkpointing)."""
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
        key = "train.recompute_keeps"
        if self.recompute_keeps != "inputs" and (self.compile or not self.recompute):
            what = f"{key} is given {'with train.compile' if self.compile else 'without train.recompute'}"
            raise WrongValue(key, what, f"leave {key} out, or name layers in train.recompute, which are not compiled")


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
    """Adam family: decay rates of the moving averages of the gradient and its square, such as [0.9, 0.95]."""
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
    """Factor reached at the end: of decaying schedules, of each cycle of restarts, and of plateau."""
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
