"""Cross-entropy of logits whose classes are cut over the ranks of a tensor group: no rank ever has those of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.errors import UserError
from hpctrain.parallel.torch_region import HALVES, Region, summed_forward


class CutLogits:
    """What a layer with ``columns(classes=True)`` gives in training: this rank's classes. ``cross_entropy`` takes it;
    torch's functions do not, which would take a part for the whole.

    Args:
        values: [..., classes of this rank].
        region: of the ranks that have the others.
        layer: that computed them, for people.
    """

    def __init__(self, values: Tensor, region: Region, layer: str) -> None:
        self.values = values
        self.region = region
        self.layer = layer

    @property
    def shape(self) -> torch.Size:
        """With the classes of all ranks."""
        return torch.Size((*self.values.shape[:-1], self.values.shape[-1] * self.region.group.size))

    def __getitem__(self, key: slice | tuple[slice, ...]) -> CutLogits:
        """A range of each leading axis, such as ``outputs[:, :-1]``."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) >= self.values.ndim or not all(isinstance(one, slice) for one in keys):
            self.refuse("the indexing")
        return CutLogits(self.values[keys], self.region, self.layer)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Functions of torch come here."""
        given = (*args, *(kwargs or {}).values())
        next(one for one in given if isinstance(one, CutLogits)).refuse(function.__name__)

    def __getattr__(self, name: str) -> NoReturn:
        """Methods of tensors come here."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(name)

    def refuse(self, what: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(
            f"{what} got the outputs of {self.layer}, of which each rank has some classes",
            "use hpctrain.cross_entropy for the loss, on them or on a range of their leading axes, or cut the layer by "
            "columns(gathers=True)",
        )


def cross_entropy(
    outputs: Tensor | CutLogits,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Cross-entropy, in nats, as ``torch.nn.functional.cross_entropy`` computes it; also of a last layer that is cut by
    ``columns(classes=True)``, without gathering what the ranks have.

    Args:
        outputs: float[..., classes], logits; of a cut layer as it gave them, or ``outputs[:, :-1]`` and the like.
        targets: int64[...], classes from 0 on, of the shape of the outputs without their last axis.
        ignore_index: targets of this value do not count.
        label_smoothing: share of each target, 0 to 1, that is spread evenly over all classes.
        reduction: the mean over the targets that count, or their sum. Where their number differs from sample to sample,
            a loss returns (sum, number).

    Returns:
        A scalar, with the same bits on all ranks that share out the layer. Of outputs of 16 bits that of a cut layer is
        float32; that of whole ones is what torch makes of them, which is float32 under ``train.precision``.

    Raises:
        UserError: outputs and targets do not fit together, or the reduction is another one.
        IndexError: a target is no class.
    """
    if outputs.shape[:-1] != targets.shape:
        raise UserError(
            f"cross_entropy got outputs {list(outputs.shape)} and targets {list(targets.shape)}",
            "give targets of the shape of the outputs without their last axis, that of the classes",
        )
    if reduction not in ("mean", "sum"):
        raise UserError(f"cross_entropy got the reduction {reduction!r}", "give mean or sum")
    flat = targets.flatten()
    if isinstance(outputs, CutLogits):
        return of_cut(outputs, flat, ignore_index, label_smoothing, reduction)
    return functional.cross_entropy(
        outputs.reshape(-1, outputs.shape[-1]),
        flat,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def of_cut(outputs: CutLogits, targets: Tensor, ignore_index: int, label_smoothing: float, reduction: str) -> Tensor:
    """Two sums over the ranks, of a number or two a target: Shoeybi et al. 2019, section 3."""
    region, classes = outputs.region, outputs.shape[-1]
    logits = outputs.values.reshape(-1, outputs.values.shape[-1])
    logits = logits.float() if logits.dtype in HALVES else logits
    counts = targets != ignore_index
    if bool((counts & ((targets < 0) | (targets >= classes))).any()):
        raise IndexError(f"a target of cross_entropy is none of {classes} classes, nor {ignore_index}")
    count = logits.shape[1]
    local = targets - region.group.rank * count
    elsewhere = (local < 0) | (local >= count)
    largest = region.gathered(logits.detach().amax(1, keepdim=True), "find the largest logit").amax(1, keepdim=True)
    shifted = logits - largest
    of_targets = shifted.gather(1, local.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0)
    parts = [shifted.exp().sum(1), of_targets, *([shifted.sum(1)] if label_smoothing else [])]
    exponentials, of_targets, *everything = summed_forward(torch.stack(parts), region, "add up the parts of a loss")
    losses = exponentials.log() - (1 - label_smoothing) * of_targets
    if everything:
        losses = losses - label_smoothing / classes * everything[0]
    total: Tensor = losses.masked_fill(~counts, 0).sum()
    return total / counts.sum() if reduction == "mean" else total
