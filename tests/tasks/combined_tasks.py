"""A PyTorch task that uses the features it is given by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain import CarriedState, PerRank
from hpctrain.config.features import Feature
from hpctrain.data.stream import open_stream
from hpctrain.tasks.definition import TorchScheduler, TorchTask, rows
from hpctrain.train.hooks import RateHook
from tests.tasks.torch_metrics import Hits

SAMPLES = 40


class Images(nn.Module):
    """A normalised convolution in any precision, with float32 inputs and outputs."""

    def __init__(self, uses: set[Feature]) -> None:
        super().__init__()
        volumes = Feature.VOLUMES in uses
        self.convolution = (nn.Conv3d if volumes else nn.Conv2d)(2, 3, 3)
        norm = nn.BatchNorm3d(3) if volumes else nn.BatchNorm2d(3)
        self.norm = nn.SyncBatchNorm(3) if Feature.JOINT_LAYERS in uses else norm
        self.activation = torch.compile(nn.Tanh()) if Feature.COMPILED_MODEL in uses else nn.Tanh()
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 1]."""
        hidden = self.activation(self.norm(self.convolution(x.to(self.head.weight.dtype))))
        return self.head(hidden.flatten(2).mean(2)).float()


class Remembering(Images):
    """Has extra state that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        """Return a number."""
        return {"count": 1}

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state."""


OF_WORDS = {Feature.MAX_NORM, Feature.SPARSE_ADAM, Feature.SPARSE_ROWS}


class Words(nn.Module):
    """An embedding table."""

    def __init__(self, uses: set[Feature]) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 1, sparse=bool(uses & OF_WORDS - {Feature.MAX_NORM}))
        self.table.max_norm = 1.0 if Feature.MAX_NORM in uses else None

    def forward(self, words: Tensor) -> Tensor:
        """[n, 1]."""
        return self.table(words).mean(1)


class Coupled(torch.optim.SGD):
    """An optimizer whose step depends on the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Divide all gradients by their joint norm (plus 1), then step as SGD."""
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.div_(norm + 1)
        super().step()


class Counting(torch.optim.SGD):
    """Overrides ``state_dict``."""

    def state_dict(self) -> dict[str, Any]:
        """Return one number."""
        return {"steps": 1}

    def load_state_dict(self, state_dict: Any) -> None:
        """Ignore the state."""


class Halved(RateHook):
    """Halves the learning rate."""

    def adjusted(self, schedule: Any) -> Any:
        return lambda step: 0.5 * schedule(step)


def forward(model: Any, batch: dict[str, Tensor]) -> Any:
    """Outputs of the first model."""
    first = next(iter(model.values())) if isinstance(model, Mapping) else model
    return first(next(iter(batch.values())))


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error over the samples."""
    return functional.mse_loss(outputs, batch["y"])


def size(model: nn.Module, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Sum of squared parameters, for a metric that captures a model."""
    return torch.stack([one.detach().square().sum() for one in model.parameters()]).sum()


def data_for(uses: set[Feature]) -> Any:
    """40 samples that fit the features."""
    random = np.random.default_rng(3)
    shape = (SAMPLES, 2, 4, 4, 4) if Feature.VOLUMES in uses else (SAMPLES, 2, 4, 4)
    inputs = {"x": random.normal(size=shape).astype(np.float32)}
    if uses & OF_WORDS:
        inputs = {"words": random.integers(0, 50, (SAMPLES, 5))}
    return inputs | {"y": random.normal(size=(SAMPLES, 1)).astype(np.float32)}


def training_data(uses: set[Feature], data: dict[str, Any]) -> Any:
    """The samples as arrays, or as a stream."""
    if Feature.STREAM not in uses:
        return data
    return open_stream([{name: array[index] for name, array in data.items()} for index in range(SAMPLES)])


def task(uses: list[str]) -> TorchTask:
    """A task with the features of these names."""
    has = {Feature[name] for name in uses}
    several = bool(has & {Feature.SEVERAL_MODELS, Feature.SEVERAL_OPTIMIZERS})
    torch.manual_seed(3)
    of_words = bool(has & OF_WORDS)
    images = Remembering if Feature.EXTRA_STATE in has else Images
    models = {name: Words(has) if of_words else images(has) for name in ("one", "other")}
    for model in models.values():
        if Feature.HALF_PARAMETERS in has:
            model.to(torch.bfloat16)
        if Feature.OWN_PRECISION in has:
            model.double()
        if Feature.MIXED_PARAMETERS in has:
            model.head.double()
        if Feature.META_INIT in has:
            model.head.to("meta")
        if Feature.PARAMETER_HOOKS in has:
            model.head.weight.register_hook(torch.clone)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if Feature.SPARSE_ADAM in has:
            return torch.optim.SparseAdam(model.parameters(), lr=0.01)
        kinds: dict[Feature, type[torch.optim.Optimizer]] = {
            Feature.UNKNOWN_OPTIMIZER: Coupled,
            Feature.OWN_OPTIMIZER_STATE: Counting,
            Feature.WHOLE_TENSORS: torch.optim.Adafactor,
        }
        kind: Any = next((kinds[one] for one in kinds if one in has), torch.optim.SGD)
        made = kind(model.parameters(), lr=0.01)
        if Feature.STEP_HOOKS in has:
            made.register_step_pre_hook(lambda optimizer, args, kwargs: None)
        return made

    def step(ctx: Any, batch: dict[str, Tensor]) -> None:
        for part in [batch] if has & {Feature.NO_SPLIT, Feature.GATHER} else ctx.split(batch):
            for name, model in ctx.models.items():
                outputs = model(next(iter(part.values())))
                outputs = ctx.gather(outputs) if Feature.GATHER in has else outputs
                ctx.backward(loss(outputs, part), name if several else None)
        for name in ctx.models:
            ctx.update(name if several else None)

    data = data_for(has)
    made: dict[str, Any] = {"train": training_data(has, data)}
    made |= {} if Feature.NO_VALIDATION in has else {"validation": data}
    made |= {} if Feature.NO_EVAL_LOSS in has else {"loss": loss}
    made |= {} if Feature.NO_FORWARD in has else {"forward": forward}
    made |= {"tensor": {"head": rows}} if Feature.NO_CUTS not in has else {}
    made |= {"metrics": {"size": functools.partial(size, models["one"])}} if Feature.CAPTURED_MODEL in has else {}
    made |= {"layers": lambda model: list(model.children())} if Feature.NO_LAYERS not in has else {}
    made |= {"step": step} if Feature.OWN_STEP in has or several else {}
    made |= {"metrics": {"loss_again": loss}} if Feature.METRICS in has else {}
    made |= {"metrics": {"hits": Hits()}} if Feature.TORCH_METRICS in has else {}
    made |= {"sampler": lambda epoch: np.arange(SAMPLES)} if Feature.SAMPLER in has else {}
    made |= {"schedule": lambda step: 0.5} if Feature.TASK_SCHEDULE in has else {}
    if has & {Feature.TORCH_SCHEDULER, Feature.EVALUATION_SCHEDULER}:
        every = "evaluation" if Feature.EVALUATION_SCHEDULER in has else "step"
        scheduler = torch.optim.lr_scheduler.StepLR
        made |= {"schedule": TorchScheduler(lambda each: scheduler(each, 1), every)}  # type: ignore[arg-type]
    made |= {"state": {"lanes": PerRank(CarriedState(), on_other_ranks="split")}} if Feature.CARRIED in has else {}
    made |= {"state": {"each": PerRank(CarriedState(), on_other_ranks="split")}} if Feature.PER_RANK in has else {}
    made |= {"hooks": [Halved()]} if Feature.RATE_HOOK in has else {}
    optimizers = {name: optimizer(model) for name, model in models.items()}
    both = {"model": models, "optimizer": optimizers}
    return TorchTask(**made, **(both if several else {name: each["one"] for name, each in both.items()}))
