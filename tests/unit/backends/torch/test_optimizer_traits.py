"""How the parameters of known and unknown optimizers may be sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim
from torch.nn import Parameter

from hpctrain.backends.torch.state.optimizer import OptimizerPart
from hpctrain.backends.torch.strategies.parameter_traits import (
    ELEMENTWISE,
    ParameterTraits,
    require_elementwise,
    traits_of,
)
from hpctrain.errors import UserError
from tests.tasks.combined_tasks import Counting, Coupled
from tests.tasks.torch_sharded import Lamb, Lion


def traits(kind: Any, parameter: Parameter, **settings: Any) -> ParameterTraits:
    return traits_of([OptimizerPart("", kind([parameter], **settings))])


@pytest.mark.parametrize("kind", [*ELEMENTWISE, Lion, Counting])
@pytest.mark.parametrize("shape", [(300, 70), (64,), (40, 30, 3, 3)])
def test_rows_of_elementwise_optimizers_are_updated_alone(kind, shape):
    found = traits(kind, Parameter(torch.zeros(shape)))
    assert found.unknown is None and len(found.updated) == len(found.elementwise) == len(found.by_rows) == 1


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon, Lamb])
def test_others_need_whole_tensors(kind):
    found = traits(kind, Parameter(torch.zeros(30, 7)))
    assert found.unknown is None and found.updated and not found.elementwise and not found.by_rows


def test_an_optimizer_that_says_nothing_is_unknown_until_it_does():
    parameter = Parameter(torch.zeros(30, 7))
    optimizer: Any = Coupled([parameter])
    assert traits_of([OptimizerPart("", optimizer)]).unknown == "Coupled", "it replaces the step of SGD"
    optimizer.elementwise = True
    assert traits_of([OptimizerPart("", optimizer)]).by_rows == {id(parameter)}


def test_a_scheduler_that_wraps_step_hides_nothing():
    optimizer = optim.SGD([Parameter(torch.zeros(30, 7))])
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert traits_of([OptimizerPart("", optimizer)]).by_rows


@pytest.mark.parametrize(("columns", "by_rows"), [(32, 1), (7, 0)])
@pytest.mark.parametrize(("dtype", "settings"), [(torch.bfloat16, {}), (torch.float32, {"fused": True})])
def test_kernels_that_round_the_end_of_a_tensor_differently_get_rows_of_whole_vectors(
    columns, by_rows, dtype, settings
):
    found = traits(optim.AdamW, Parameter(torch.zeros(30, columns, dtype=dtype)), **settings)
    assert len(found.elementwise) == 1 and len(found.by_rows) == by_rows


@pytest.mark.parametrize("shape", [(), (1,), (1, 7), (0, 3), (3, 0)])
def test_less_than_two_rows_are_not_cut(shape):
    found = traits(optim.Adam, Parameter(torch.zeros(shape)))
    assert found.unknown is None and not found.elementwise


@pytest.mark.parametrize(
    ("kind", "said"), [(optim.Adafactor, "does not"), (Lamb, "does not"), (Coupled, "is not known to")]
)
def test_parameters_that_are_split_need_elementwise_optimizers(kind, said):
    parameter = Parameter(torch.zeros(8, 8))
    with pytest.raises(UserError, match=f"{kind.__name__} {said} update each element of weight by itself"):
        require_elementwise(kind([parameter]), parameter, "weight")
    require_elementwise(kind([Parameter(torch.zeros(8, 8))]), parameter, "weight")
    require_elementwise(optim.AdamW([parameter]), parameter, "weight")
