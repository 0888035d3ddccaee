"""Metrics with a state in a TorchTask: what they get, which are refused, and that a dry call leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain import Selected, UserError
from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.steps.batch_metrics import BatchMetrics
from hpctrain.backends.torch.torch_framework import on_host
from hpctrain.backends.torch.torch_metrics import to_host
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.train.evaluation import evaluate, try_meters
from tests.tasks.torch_metrics import Hits, Median, dim_zero_mean, dim_zero_sum
from tests.tasks.torch_tasks import make_framework, samples


def outputs_and_classes(outputs: Any, batch: Any) -> Any:
    return outputs, batch["y"]


class Collection(nn.ModuleDict):
    """As torchmetrics' MetricCollection."""

    def update(self, *arrays: Any) -> None: ...  # type: ignore[override]

    def compute(self) -> None: ...


class LikeKeras:
    """As a metric of Keras."""

    variables = ()

    def update_state(self) -> None: ...

    def result(self) -> None: ...

    def reset_state(self) -> None: ...


class Wrapper(Hits):
    """As torchmetrics' wrappers, which hold another metric."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Median()


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            Hits(dim_zero_mean),
            r"metrics\['it'\] of the task, Hits, merges its state 'hits' .* by dim_zero_mean",
        ),
        (Hits(None), r"metrics\['it'\] of the task, Hits, merges its state 'hits' over ranks by None"),
        (Hits(lambda values: values), "over ranks by <lambda>"),
        (Hits(dim_zero_sum, begin=1), "sums its state 'hits' over ranks, and its initial value is not 0"),
        (Collection(), "is a Collection, which is not a metric of torchmetrics"),
        (Wrapper(), "is a Wrapper, which keeps its state in other metrics"),
        (LikeKeras(), "is a LikeKeras, which is not a metric of torchmetrics.* without init, update, merge, compute"),
        (Selected(Hits, outputs_and_classes), r"metrics\['it'\] of the task is the class Hits"),
    ],
)
def test_a_metric_that_cannot_be_merged_exactly_is_refused_by_name(metric, said):
    with pytest.raises(UserError, match=said):
        make_framework(alone(), metrics={"it": metric})


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Hits(), r"metrics\['it'\]: it compares .* and there are batches of x, y, w, words"),
        (Selected(Hits(), lambda outputs, batch: outputs), r"the function of metrics\['it'\] returned a Tensor"),
        (
            Selected(Hits(), lambda outputs, batch: (outputs, batch["z"])),
            r"metrics\['it'\] fails: KeyError: 'z' \(t",
        ),
        (Selected(Hits(), lambda outputs, batch: (outputs, batch["x"])), r"metrics\['it'\] fails: RuntimeError"),
    ],
)
def test_a_metric_that_fails_on_the_first_batch_is_named_with_the_line(metric, said):
    framework = make_framework(alone(), metrics={"it": metric})
    with pytest.raises(UserError, match=said) as caught:
        try_meters(framework, samples())
    assert caught.value.fix


def test_each_evaluation_begins_afresh_and_half_precision_is_full_for_metrics():
    metrics = {"hits": Selected(Hits(), outputs_and_classes), "median": Selected(Median(), outputs_and_classes)}
    framework = make_framework(alone(), metrics=metrics, precision="bf16")
    first = evaluate(framework, {"validation": [samples()]}, Group("alone"))
    try_meters(framework, {name: array[:5] for name, array in samples().items()})
    framework.evaluate(samples(), framework.meters.values())  # of an evaluation that was not finished
    assert evaluate(framework, {"validation": [samples()]}, Group("alone")) == first
    outputs = framework.predict(samples())["output"]
    right = (outputs.argmax(1) == samples()["y"]).mean()
    assert first.metrics["hits/share"] == pytest.approx(right)
    assert outputs.dtype == np.float32 and first.metrics["median"] == torch.from_numpy(outputs).median()


@pytest.mark.parametrize("lazy", [torch.conj, lambda values: values.conj().imag])
def test_values_that_torch_conjugates_or_negates_later_come_to_the_host(lazy):
    values = lazy(torch.tensor([1 + 2j, 3 - 1j]))
    for found in (to_host(values), on_host(values)):
        np.testing.assert_array_equal(found, values.resolve_conj().resolve_neg())


@pytest.mark.parametrize(("output", "kind"), [((torch.ones(2),), "a tuple"), (torch.eye(2).to_sparse(), "sparse_coo")])
def test_outputs_that_are_no_arrays_are_named(output, kind):
    with pytest.raises(UserError, match=f"past of the model's outputs is .*{kind}"):
        on_host(output, "past")


def test_metrics_that_keep_state_compute_in_full_precision_within_a_forward_pass():
    """As outside of one: a pipeline computes metrics of training batches where its stages run."""
    found = []

    class Products:
        def update(self, seen: Any) -> None:
            found.append((seen.outputs @ seen.outputs).dtype)

    compute = Compute(torch.device("cpu"), torch.bfloat16)
    metrics = BatchMetrics(compute, {"product": lambda outputs, batch: (outputs @ outputs).sum()}, {0: Products()})
    with compute.autocast():
        metrics.scores(torch.eye(3), {}, {"x": np.zeros(3)})
    assert found == [torch.float32]
