"""Every module of torch.nn that holds parameters, and models of many kinds, each with its data and settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.tasks.definition import first_field
from tests.support.sweep import Batch, code, numbers

HOLDS_PARAMETERS = re.compile(r"Parameter(List|Dict)?\(|Linear\(|Attention\(|_get_clones|Layer\(")
NO_MODULES = {"RNNBase", "RNNCellBase"}
"""Base classes of other modules, which cannot be called."""


def with_parameters() -> set[str]:
    """Names of all modules of torch.nn whose code makes parameters or holds a module that does."""
    return {
        name
        for name, cls in vars(nn).items()
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and HOLDS_PARAMETERS.search(code(cls, nn.Module))
    } - NO_MODULES


def distance(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean squared distance of all outputs from fixed, distinct numbers."""
    total = torch.zeros(())
    for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
        flat = output.flatten(1)
        total = total + (flat - torch.sin(torch.arange(flat.shape[1], dtype=flat.dtype))).square().mean()
    return total


def itself(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Loss for modules whose output is the loss."""
    return outputs


@dataclass(frozen=True)
class Problem:
    """A model and its training."""

    model: Callable[[], nn.Module]
    fields: Batch
    """Arrays of all samples."""
    forward: Callable[[Any, Any], Any] = first_field
    loss: Callable[[Any, Any], Any] = distance
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9)
    train: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the ``train`` section."""
    accuracy: float = 1e-6
    """Largest allowed difference from one process."""


def of(shape: tuple[int, ...], model: Callable[[], nn.Module], below: int | None = None, **more: Any) -> Problem:
    """A problem with one input: floats, or integers in [0, below)."""
    return Problem(model, {"x": numbers(shape, below)}, **more)


def recurrent(make: Callable[..., nn.Module]) -> Problem:
    """A problem with a layer over sequences; the loss uses its outputs, not its final state."""
    return of((5, 4), lambda: make(4, 3, batch_first=True), forward=lambda model, batch: model(batch["x"])[0])


def cell(make: Callable[..., nn.Module]) -> Problem:
    """A problem with one time step of a cell."""
    return of((4,), lambda: make(4, 3))


def lazy(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Problem:
    """A problem with a lazy module, initialised by an example batch in the task, as hpctrain requires."""

    def model() -> nn.Module:
        made = make()
        made(torch.from_numpy(numbers(shape)))
        return made

    return of(shape, model)


def with_labels(make: Callable[[], nn.Module], give: Callable[[Any], Tensor]) -> Problem:
    """A problem with a module that also takes classes and returns a loss."""
    fields = {"x": numbers((4,)), "y": numbers((), 6)}
    return Problem(make, fields, lambda model, batch: give(model(batch["x"], batch["y"])), itself)


class Attending(nn.Module):
    """Runs a decoder, or one of its layers, on sequences and their reversal."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Any:
        """Use the reversed inputs as targets."""
        return self.inner(inputs.flip(1), inputs)


class Held(nn.Module):
    """Parameters in a container."""

    def __init__(self, container: nn.Module) -> None:
        super().__init__()
        self.container = container

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs times the first parameter, plus the second."""
        parameters = list(self.container.parameters())
        return inputs * parameters[0] + parameters[1]


def encoder_layer() -> nn.Module:
    """An encoder layer of width 4, without dropout."""
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


def decoder_layer() -> nn.Module:
    """A decoder layer of width 4, without dropout."""
    return nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


def parameters() -> list[nn.Parameter]:
    """Two parameters of different shapes."""
    return [nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(1))]


MODULES = {
    "AdaptiveLogSoftmaxWithLoss": with_labels(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4]), lambda outputs: outputs.loss
    ),
    "BatchNorm1d": of((4,), lambda: nn.BatchNorm1d(4)),
    "BatchNorm2d": of((4, 3, 3), lambda: nn.BatchNorm2d(4)),
    "BatchNorm3d": of((4, 2, 2, 2), lambda: nn.BatchNorm3d(4)),
    "Bilinear": of((4,), lambda: nn.Bilinear(4, 4, 3), forward=lambda model, batch: model(batch["x"], batch["x"])),
    "Conv1d": of((2, 6), lambda: nn.Conv1d(2, 3, 2)),
    "Conv2d": of((2, 5, 5), lambda: nn.Conv2d(2, 3, 2)),
    "Conv3d": of((2, 4, 4, 4), lambda: nn.Conv3d(2, 3, 2)),
    "ConvTranspose1d": of((2, 6), lambda: nn.ConvTranspose1d(2, 3, 2)),
    "ConvTranspose2d": of((2, 5, 5), lambda: nn.ConvTranspose2d(2, 3, 2)),
    "ConvTranspose3d": of((2, 4, 4, 4), lambda: nn.ConvTranspose3d(2, 3, 2)),
    "Embedding": of((5,), lambda: nn.Embedding(7, 3), 7),
    "EmbeddingBag": of((5,), lambda: nn.EmbeddingBag(7, 3), 7),
    "GRU": recurrent(nn.GRU),
    "GRUCell": cell(nn.GRUCell),
    "GroupNorm": of((4, 5), lambda: nn.GroupNorm(2, 4)),
    "InstanceNorm1d": of((4, 5), lambda: nn.InstanceNorm1d(4, affine=True)),
    "InstanceNorm2d": of((4, 3, 3), lambda: nn.InstanceNorm2d(4, affine=True)),
    "InstanceNorm3d": of((4, 2, 2, 2), lambda: nn.InstanceNorm3d(4, affine=True)),
    "LSTM": recurrent(nn.LSTM),
    "LSTMCell": of((4,), lambda: nn.LSTMCell(4, 3)),
    "LayerNorm": of((5, 4), lambda: nn.LayerNorm(4)),
    "LazyBatchNorm1d": lazy(nn.LazyBatchNorm1d, (4,)),
    "LazyBatchNorm2d": lazy(nn.LazyBatchNorm2d, (4, 3, 3)),
    "LazyBatchNorm3d": lazy(nn.LazyBatchNorm3d, (4, 2, 2, 2)),
    "LazyConv1d": lazy(lambda: nn.LazyConv1d(3, 2), (2, 6)),
    "LazyConv2d": lazy(lambda: nn.LazyConv2d(3, 2), (2, 5, 5)),
    "LazyConv3d": lazy(lambda: nn.LazyConv3d(3, 2), (2, 4, 4, 4)),
    "LazyConvTranspose1d": lazy(lambda: nn.LazyConvTranspose1d(3, 2), (2, 6)),
    "LazyConvTranspose2d": lazy(lambda: nn.LazyConvTranspose2d(3, 2), (2, 5, 5)),
    "LazyConvTranspose3d": lazy(lambda: nn.LazyConvTranspose3d(3, 2), (2, 4, 4, 4)),
    "LazyInstanceNorm1d": lazy(lambda: nn.LazyInstanceNorm1d(affine=True), (4, 5)),
    "LazyInstanceNorm2d": lazy(lambda: nn.LazyInstanceNorm2d(affine=True), (4, 3, 3)),
    "LazyInstanceNorm3d": lazy(lambda: nn.LazyInstanceNorm3d(affine=True), (4, 2, 2, 2)),
    "LazyLinear": lazy(lambda: nn.LazyLinear(3), (4,)),
    "Linear": of((2, 3, 4), lambda: nn.Linear(4, 3)),
    "LinearCrossEntropyLoss": with_labels(lambda: nn.LinearCrossEntropyLoss(4, 6), lambda loss: loss),
    "MultiheadAttention": of(
        (5, 4),
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        forward=lambda model, batch: model(batch["x"], batch["x"], batch["x"])[0],
    ),
    "PReLU": of((4,), lambda: nn.PReLU(4)),
    "ParameterDict": of((4,), lambda: Held(nn.ParameterDict(dict(zip("ab", parameters(), strict=True))))),
    "ParameterList": of((4,), lambda: Held(nn.ParameterList(parameters()))),
    "RMSNorm": of((5, 4), lambda: nn.RMSNorm(4)),
    "RNN": recurrent(nn.RNN),
    "RNNCell": cell(nn.RNNCell),
    "SyncBatchNorm": of((4,), lambda: nn.SyncBatchNorm(4)),
    "Transformer": of((5, 4), lambda: Attending(nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True))),
    "TransformerDecoder": of((5, 4), lambda: Attending(nn.TransformerDecoder(decoder_layer(), 2))),
    "TransformerDecoderLayer": of((5, 4), lambda: Attending(decoder_layer())),
    "TransformerEncoder": of((5, 4), lambda: nn.TransformerEncoder(encoder_layer(), 2)),
    "TransformerEncoderLayer": of((5, 4), encoder_layer),
}
"""Problems by name of the class."""


class TwoInputs(nn.Module):
    """A model with two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(4, 3), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of inputs float32[samples, 4] and float32[samples, 2, 3]."""
        joined = torch.cat([self.first(x), self.second(z.flatten(1))], 1)
        return self.both(joined), joined.tanh()


class Shared(nn.Module):
    """A model that uses one layer twice, and one matrix in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs as wide as the inputs."""
        return self.layer(self.tied(self.layer(inputs).tanh()).tanh())


class Held64(nn.Module):
    """A double-precision layer between single-precision ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Single-precision inputs and outputs."""
        return self.after(self.inner(self.before(inputs).double()).float())


class Unused(nn.Module):
    """A model with a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the used layer."""
        return self.used(inputs)


def plain() -> nn.Module:
    """A model with three layers."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.ModuleDict({"inner": nn.Linear(6, 4)})["inner"], nn.Linear(4, 2)
    )


def frozen() -> nn.Module:
    """A model whose middle layer is frozen."""
    model = plain()
    model[2].requires_grad_(False)
    return model


def reparametrized() -> nn.Module:
    """A model with parametrised weights."""
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    )


def weighted(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Weighted squares of the outputs, as (sum, weight)."""
    weights = batch["w"].abs()
    return (weights * outputs.square().sum(1)).sum(), weights.sum()


ROW = {"x": numbers((4,))}
DOUBLE = {"x": numbers((4,)).astype(np.float64)}

SHAPES = {
    "several inputs and outputs": Problem(
        TwoInputs, {"x": numbers((4,)), "z": numbers((2, 3))}, lambda model, batch: model(batch["x"], batch["z"])
    ),
    "shared layers": Problem(Shared, ROW),
    "a layer in float64": Problem(Held64, ROW),
    "float64 everywhere": Problem(lambda: plain().double(), DOUBLE, accuracy=1e-14),
    "16-bit parameters": Problem(
        lambda: plain().bfloat16(), ROW, lambda model, batch: model(batch["x"].bfloat16()).float(), accuracy=3e-2
    ),
    "mixed precision, bf16": Problem(plain, ROW, train={"precision": "bf16"}, accuracy=1e-2),
    "frozen layers": Problem(frozen, ROW),
    "layer without gradient": Problem(Unused, ROW),
    "sparse gradients": Problem(lambda: nn.Embedding(7, 3, sparse=True), {"x": numbers((5,), 7)}),
    "reparametrized": Problem(reparametrized, ROW),
    "channels last": of((2, 5, 5), lambda: nn.Conv2d(2, 3, 2), train={"channels_last": True}),
    "weighted loss": Problem(plain, {"x": numbers((4,)), "w": numbers(())}, loss=weighted),
    "accumulation": Problem(plain, ROW, train={"accumulate": 2}),
    "optimizer, weight decay": Problem(plain, ROW, optimizer=lambda w: torch.optim.SGD(w, 0.1, weight_decay=0.1)),
    "optimizer, fused": Problem(plain, ROW, optimizer=lambda w: torch.optim.SGD(w, 0.1, momentum=0.9, fused=True)),
}
"""Problems by their special property."""


def everything() -> dict[str, Problem]:
    """All problems by name: modules, and kinds of models."""
    return {**MODULES, **SHAPES}
