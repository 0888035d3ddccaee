"""How optimizers may be shared out, as they say themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import Parameter

from hpctrain.backends.torch.strategies.parameter_traits import OptimizerTraits, try_optimizer
from hpctrain.errors import UserError
from hpctrain.parallel.sharded import LARGEST_TENSOR, small, uneven_rows
from tests.tasks.combined_tasks import Coupled
from tests.tasks.torch_sharded import Lamb, Lion


def verdict(
    kind: Any, shape: tuple[int, ...] = (300, 70), dtype: torch.dtype = torch.float32, **settings: Any
) -> OptimizerTraits:
    parameter = Parameter(torch.randn(shape, dtype=dtype))
    optimizer = kind([parameter], **settings)
    return try_optimizer(optimizer, optimizer.param_groups[0], parameter)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.NAdam, Lion])
@pytest.mark.parametrize("shape", [(300, 70), (64,), (40, 30, 3, 3)])
def test_rows_of_element_by_element_optimizers_may_be_cut(kind: Any, shape: tuple[int, ...]) -> None:
    found = verdict(kind, shape, weight_decay=0.1)
    assert found.is_alone and found.by_rows


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon, Lamb])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_those_that_look_at_tensors_may_not_be_cut(kind: Any, dtype: torch.dtype) -> None:
    found = verdict(kind, dtype=dtype)
    assert found.is_alone and not found.by_rows and not found.nearly_by_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(512,), (31,), (300, 7)])
def test_kernels_that_round_the_end_of_a_tensor_otherwise_nearly_go_by_rows(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = verdict(optim.AdamW, shape, dtype, fused=True)
    assert found.is_alone and found.nearly_by_rows


def test_what_an_update_takes_from_other_parameters_shows() -> None:
    assert not verdict(Coupled, lr=0.1).is_alone


def test_counts_are_told_from_what_has_rows() -> None:
    assert verdict(optim.Adam).common == {"step"}
    assert verdict(optim.Adafactor).common == {"step", "row_var", "col_var"}


@pytest.mark.parametrize("shape", [(), (1,), (1, 7)])
def test_one_row_is_not_cut(shape: tuple[int, ...]) -> None:
    found = verdict(optim.Adam, shape)
    assert found.is_alone and not found.by_rows


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"lr": torch.tensor(0.0)}, {"lr": 1e-12}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_of_nothing_hides_nothing(settings: dict[str, Any], dtype: torch.dtype) -> None:
    found = verdict(optim.Adafactor, dtype=dtype, **settings)
    assert not found.by_rows and not found.nearly_by_rows


class Elsewhere(optim.SGD):
    """Updates a parameter that it remembers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.count = 0
        self.mine = lambda: self.param_groups[0]["params"][:0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""
        self.count += len(self.mine())


class Failing(optim.SGD):
    """Knows one shape only."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raises."""
        raise RuntimeError("shape [2]")


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Elsewhere, "does not update what is in its param_groups"), (Failing, "fails on a small copy .*: shape \\[2\\]")],
)
def test_what_cannot_be_tried_is_named(kind: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"{kind.__name__} {said}"):
        verdict(kind)


def test_hooks_schedulers_state_and_values_stay_out_of_it() -> None:
    model = nn.Linear(30, 40)
    optimizer = optim.Adagrad(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[object] = []
    optimizer.register_step_post_hook(lambda *call: calls.append(call))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = try_optimizer(optimizer, optimizer.param_groups[0], model.weight)
    assert found.by_rows and not calls
    assert scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(float(state["step"]) == 0 and not state["sum"].any() for state in optimizer.state.values())


@pytest.mark.parametrize("shape", [(), (1,), (7,), (10**6,), (50000, 768), (512, 512, 3, 3), (2, 9999, 9999)])
def test_what_is_tried_is_small_and_of_the_same_kind(shape: tuple[int, ...]) -> None:
    found = small(shape)
    assert len(found) == len(shape) and all(1 <= one <= size for one, size in zip(found, shape, strict=True))
    assert torch.Size(found).numel() <= LARGEST_TENSOR
    if shape and shape[0] > 1:
        assert len(uneven_rows(found)) > 1
    if len(shape) == 2 and min(shape) > 128:
        assert min(found) > 128
