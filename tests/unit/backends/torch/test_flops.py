"""Operations are counted beside the call that would be made anyway."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from hpctrain.backends.torch.performance import peak_per_s, trying
from hpctrain.errors import UserError
from hpctrain.train.flops import Flops


class Attention(nn.Module):
    """In one kernel, which CPUs have of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.attended(q, k, v)

    def attended(self, *qkv: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*qkv, is_causal=True)


class Flexible(Attention):
    """By an operator of higher order, which PyTorch differentiates on GPUs only."""

    def attended(self, *qkv: torch.Tensor) -> torch.Tensor:
        return flex_attention(*(one.detach() for one in qkv), score_mod=lambda score, b, h, i, j: score - 0.1 * (i - j))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (8,), 2 * (8 * 16 + 16 * 4)),
    "images": (lambda: nn.Conv2d(3, 8, 3), (3, 10, 10), 2 * 8 * 8 * 8 * 3 * 9),
    "attention": (Attention, (5, 8), 2 * 5 * 8 * 24 + 2 * 2 * 2 * 5 * 5 * 4),
    "flex attention": (Flexible, (5, 8), 2 * 5 * 8 * 24 + 2 * 2 * 2 * 5 * 5 * 4),
}


def on(model: nn.Module, *shape: int) -> Flops | None:
    inputs = torch.ones(6, *shape)
    return trying(lambda: model(inputs), model, 6, None)[1]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MODELS)
def test_training_takes_three_forward_passes(name):
    make, shape, forward = MODELS[name]
    found = on(make(), *shape)
    assert found is not None
    assert found.per_sample == 3 * forward
    assert found.utilisation(5.0) == pytest.approx(5 * 3 * forward / found.peak_per_s)


@pytest.mark.parametrize(
    "model",
    [nn.LSTM(8, 4), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4).requires_grad_(False)), nn.LayerNorm(8)],
    ids=["kernels that are not known", "weights that are not trained", "no products"],
)
def test_what_cannot_be_counted_is_left_out(model):
    assert on(model, 3, 8) is None


def test_random_numbers_are_those_of_one_call():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    outputs: list[torch.Tensor] = []
    states = []
    for counts in (True, False):
        torch.manual_seed(3)
        inputs = torch.ones(4, 8)
        if counts:
            assert trying(lambda inputs=inputs: outputs.append(model(inputs)), model, 4, None)[1] is not None
        else:
            outputs.append(model(inputs))
        states.append(torch.get_rng_state())
    assert torch.equal(*outputs) and torch.equal(*states)


class Shy(nn.Linear):
    """Cannot be called while somebody looks on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("not now")
        return super().forward(x)


def test_a_model_that_cannot_be_counted_is_called_all_the_same():
    assert on(Shy(8, 4), 8) is None


def test_a_call_in_which_ranks_meet_is_made_once():
    calls = []

    def call():
        calls.append(1)
        raise RuntimeError("of this rank's counter")

    with pytest.raises(RuntimeError, match="of this rank's counter"):
        trying(call, nn.Linear(2, 2), 3, None, is_collective=True)
    assert len(calls) == 1


def test_errors_of_the_call_pass_through():
    def fails(**_):
        raise UserError("wrong", "mend it")

    with pytest.raises(UserError, match="wrong"):
        trying(fails, nn.Linear(2, 2), 3, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_devices_peak_is_measured_in_the_models_type(dtype):
    before = torch.get_rng_state()
    assert 1e8 < peak_per_s(torch.device("cpu"), dtype) < 1e14
    assert torch.equal(torch.get_rng_state(), before)
