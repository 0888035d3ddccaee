"""The first-batch check finds losses that ranks and micro-batches cannot average, and nothing else."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.backends.torch.task.by_name import as_loss
from hpctrain.backends.torch.task.checks import try_metrics
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.tasks.definition import PerBatch, TorchTask
from tests.tasks.torch_tasks import make_framework, noisy_model, plain_model, samples, sgd

ROWS = 17
TOKENS = 8


def batch() -> dict[str, Any]:
    """Samples of which some have ignored labels and masked tokens, as padded texts have."""
    some = {name: array[:ROWS] for name, array in samples().items()}
    labels, real = some["y"].copy(), np.arange(TOKENS) < 1 + np.arange(ROWS)[:, None] % TOKENS
    labels[[1, 5, 6]] = -100
    return {**some, "labels": labels, "mask": real.astype(np.float32)}


def each(outputs: Tensor, batch: Any) -> Tensor:
    """The squared error of each sample."""
    return (outputs[:, 0] - batch["w"]) ** 2


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs, batch["labels"])


def contrastive(outputs: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def dice(outputs: Tensor, batch: Any) -> Tensor:
    chosen = outputs.sigmoid()
    return 1 - 2 * (chosen * batch["w"][:, None]).sum() / (chosen.sum() + batch["w"].sum())


NO_MEANS: dict[str, Callable[..., Any]] = {
    "sum": lambda outputs, batch: each(outputs, batch).sum(),
    "sum by a constant": lambda outputs, batch: each(outputs, batch).sum() / ROWS,
    "root": lambda outputs, batch: each(outputs, batch).mean().sqrt(),
    "ratio of sums": dice,
    "masked mean": lambda outputs, batch: (
        (batch["mask"] * (outputs[:, :1] - batch["w"][:, None]) ** 2).sum() / batch["mask"].sum()
    ),
    "ignored labels": cross_entropy,
    "contrastive": contrastive,
    "in 16 bits": lambda outputs, batch: each(outputs.bfloat16(), batch).sum().bfloat16(),
    "changes its outputs": lambda outputs, batch: outputs.mul_(2).sum(),
}
MEANS: dict[str, Callable[..., Any]] = {
    "mean": lambda outputs, batch: each(outputs, batch).mean(),
    "constant added": lambda outputs, batch: each(outputs, batch).mean() + 0.3,
    "in 16 bits": lambda outputs, batch: each(outputs.bfloat16(), batch).mean().bfloat16(),
    "masked": lambda outputs, batch: (each(outputs, batch) * batch["mask"][:, 0]).sum() / len(outputs),
    "of pairs": lambda outputs, batch: (outputs[0::2][: len(outputs) // 2] - outputs[1::2]).abs().mean(),
    "sum and weight": lambda outputs, batch: (
        (functional.cross_entropy(outputs, batch["labels"], reduction="sum")),
        (batch["labels"] != -100).sum(),
    ),
    "meant": PerBatch(contrastive),
    "changes its outputs": lambda outputs, batch: outputs.mul_(2).mean(),
    "changes its batch": lambda outputs, batch: each(outputs, {"w": batch["w"].add_(1)}).mean(),
    "random": lambda outputs, batch: (each(outputs, batch) * torch.rand(len(outputs))).mean(),
    "of a whole batch": lambda outputs, batch: outputs.reshape(ROWS, 3).sum(),
    "zero": lambda outputs, batch: 0.0 * outputs.sum(),
    "not finite": lambda outputs, batch: torch.log(outputs.abs() - 1e9).sum(),
}


@pytest.mark.parametrize("name", NO_MEANS)
def test_a_loss_that_is_no_mean_is_refused_with_its_numbers(name):
    framework = make_framework(alone(), loss=NO_MEANS[name])
    with pytest.raises(
        UserError, match=r"(?s)loss is not a mean .* for 2 samples, .* for 4 others .*return \(sum, weight"
    ):
        framework.dry_call(batch())


@pytest.mark.parametrize("model", [plain_model, noisy_model])
@pytest.mark.parametrize("name", MEANS)
def test_a_loss_that_can_be_averaged_is_accepted(name, model):
    make_framework(alone(), model, loss=MEANS[name]).dry_call(batch())


def test_the_numbers_are_those_of_the_parts():
    framework = make_framework(alone(), loss=lambda outputs, batch: outputs.sum() * 0 + len(outputs))
    said = "it is 2 for 2 samples, 4 for 4 others and 6 for all 6, and not 3.33333"
    with pytest.raises(UserError, match=f"(?s){said}"):
        framework.dry_call(batch())


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda loss, n: (loss.sum(), loss.mean()), "weight that depends on the model's parameters.*return the sum"),
        (lambda loss, n: (loss.sum(), torch.tensor(64)), "weight that does not add up .* 64 for 2 samples.*number of"),
        (lambda loss, n: (loss.mean(), n), "sum that does not add up .* not the mean"),
        (lambda loss, n: (loss.sum() + 5, n), "sum that does not add up .* a penalty times the weight"),
    ],
)
def test_a_pair_that_is_no_sum_and_weight_is_refused(score, said):
    framework = make_framework(alone(), loss=lambda outputs, batch: score(each(outputs, batch), len(outputs)))
    with pytest.raises(UserError, match=f"(?s){said}"):
        framework.dry_call(batch())


class Own(nn.Module):
    """A model that computes its loss, as those of transformers do, with dropout and BatchNorm."""

    def __init__(self, reduction: Callable[[Tensor, Tensor], Tensor], noise: float = 0.0) -> None:
        super().__init__()
        self.inner, self.reduction, self.noise = noisy_model(), reduction, noise

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(x)
        return OrderedDict(loss=self.reduction(logits + self.noise * torch.randn_like(logits), labels), logits=logits)


def own_loss(reduction: Callable[[Tensor, Tensor], Tensor], noise: float = 0.0) -> None:
    framework = make_framework(
        alone(),
        lambda: Own(reduction, noise),
        lambda outputs, batch: outputs["loss"],
        forward=lambda model, batch: model(batch["x"], batch["labels"]),
    )
    framework.dry_call(batch())
    assert framework.model.training


def test_a_loss_of_the_model_itself_is_tried_by_calling_the_model():
    own_loss(lambda logits, labels: functional.mse_loss(logits[:, 0], labels.float()))
    with pytest.raises(UserError, match="loss is not a mean"):
        own_loss(functional.cross_entropy)
    own_loss(functional.cross_entropy, noise=1.0)  # random, so unknown


def test_a_micro_batch_of_one_sample_is_tried_as_a_pair():
    """With one sample, a mean over its tokens looks like a mean over samples: the usual way to train large models."""

    def loss(outputs, batch):
        return (batch["mask"] * (outputs[:, :1] - batch["w"][:, None]) ** 2).sum() / batch["mask"].sum()

    framework = make_framework(alone(), loss=loss)
    one, pair = ({name: array[:samples] for name, array in batch().items()} for samples in (1, 2))
    framework.dry_call(one)
    with pytest.raises(UserError, match=r"loss is not a mean .* for 1 samples"):
        framework.dry_call(one, (), pair)
    make_framework(alone(), loss=MEANS["mean"]).dry_call(one, (), pair)


def test_rows_of_another_axis_are_not_taken_for_samples():
    """As many time steps as samples: [time, samples, features]."""

    def forward(model, batch):
        return torch.stack([model(batch["x"])] * len(batch["x"]))

    def loss(outputs, batch):
        return (outputs[..., 0] * batch["w"]).mean()

    make_framework(alone(), loss=loss, forward=forward).dry_call(batch())


def test_a_metric_is_tried_as_well():
    model = plain_model()
    metrics = {"mse": MEANS["mean"], "rmse": NO_MEANS["root"]}
    task = TorchTask(model, MEANS["mean"], sgd(model), None, metrics=metrics)
    tensors = {name: torch.from_numpy(array) for name, array in batch().items()}
    with torch.no_grad():
        with pytest.raises(UserError, match=r"metrics\['rmse'\] is not a mean"):
            try_metrics(task, model, tensors)
        try_metrics(dataclasses.replace(task, metrics={"mse": MEANS["mean"]}), model, tensors)


CLASSES = torch.tensor([0.2, 1.0, 3.0])
NAMED: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "name": ("cross_entropy", functional.cross_entropy),
    "nll": ("nll", functional.nll_loss),
    "function": (functional.cross_entropy, functional.cross_entropy),
    "object": (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=2), nn.CrossEntropyLoss(ignore_index=2)),
    "weights": (
        nn.CrossEntropyLoss(CLASSES, label_smoothing=0.1),
        nn.CrossEntropyLoss(CLASSES, label_smoothing=0.1),
    ),
    "nll weights": (nn.NLLLoss(CLASSES), nn.NLLLoss(CLASSES)),
}


@pytest.mark.parametrize("name", NAMED)
def test_losses_of_classes_are_weighted_by_what_counts(name):
    given, wanted = NAMED[name]
    outputs = torch.randn(ROWS, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 3, (ROWS, 5), generator=torch.Generator().manual_seed(1))
    labels[3:9, 2] = -100 if "ignore" not in name else 2
    loss = as_loss(given, ("x", "y"))
    parts = [loss(outputs[rows], {"y": labels[rows]}) for rows in (slice(0, 4), slice(4, ROWS))]
    total, weight = (sum(values) for values in zip(*parts, strict=True))
    torch.testing.assert_close(total / weight, wanted(outputs, labels))
    unknown = loss(outputs[:1], {"y": torch.full((1, 5), -100 if "ignore" not in name else 2)})
    assert (float(unknown[0]), float(unknown[1])) == (0, 0)


def test_probabilities_as_targets_are_averaged_over_all_positions():
    outputs, targets = torch.randn(ROWS, 3, 5), torch.rand(ROWS, 3, 5)
    total, weight = as_loss(nn.CrossEntropyLoss(CLASSES), ("x", "y"))(outputs, {"y": targets})
    torch.testing.assert_close(total / weight, nn.CrossEntropyLoss(CLASSES)(outputs, targets))
