"""Gradients in one flat buffer, on one process with a sum that only records what is sent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hpctrain.backends.torch.reduce.gradients import FlatGradients, as_real
from hpctrain.backends.torch.reduce.reducer import FlatReducer, NoReducer
from hpctrain.backends.torch.reduce.streamed_reducer import StreamedReducer
from hpctrain.errors import UserError
from hpctrain.reduce.flat_layout import SLOTS, plan
from hpctrain.train.clock import NO_CLOCK


class Recorder:
    """A sum over one rank."""

    def __init__(self, length: int, dtype: torch.dtype = torch.float32) -> None:
        self.flat = torch.full((length,), 7.0, dtype=dtype)
        self.sent: list[tuple[int, int]] = []
        self.finished = 0

    def start(self, begin: int, end: int) -> None:
        self.sent.append((begin, end))

    def finish(self) -> None:
        self.finished += 1

    def close(self) -> None:
        pass


def make(
    model: nn.Module, bucket: int | None = None, dtype: torch.dtype = torch.float32, apart: float = math.inf
) -> tuple[FlatReducer, Recorder]:
    flat, recorder = flat_gradients(model, bucket, dtype, apart)
    return FlatReducer("test", flat, recorder), recorder


def flat_gradients(
    model: nn.Module, bucket: int | None, dtype: torch.dtype = torch.float32, apart: float = math.inf
) -> tuple[FlatGradients, Recorder]:
    parameters = list(model.named_parameters())
    layout = plan([as_real(parameter).numel() for _, parameter in parameters], bucket, SLOTS, None, apart)
    recorder = Recorder(layout.length, dtype)

    def ready(number: int) -> None:
        recorder.start(layout.buckets[number].begin, layout.buckets[number].end)

    return FlatGradients(parameters, recorder.flat, layout, ready), recorder


def streamed(model: nn.Module) -> tuple[StreamedReducer, Recorder, list[float]]:
    """A reducer that waits by appending to the list."""
    flat, recorder = flat_gradients(model, 64)
    waits: list[float] = []
    return StreamedReducer("test", flat, recorder, waits.append), recorder, waits


def test_gradients_that_arrive_in_parts_come_behind_the_loss():
    model = network()
    reducer, recorder, waited = streamed(model)
    layout = reducer.flat_gradients.layout
    for _ in range(2):
        recorder.sent.clear()
        waited.clear()
        reducer.begin()
        value = loss(model)
        reducer.before_backward(lambda value=value: (value.detach(), None))
        assert recorder.sent == [(layout.gradients, layout.length)], "the loss leaves before any gradient"
        value.backward()
        assert reducer.exchange().loss == pytest.approx(value.item())
        assert waited == [1]
        held = []
        for (part,) in reducer.parts(NO_CLOCK):
            there = [index for index, parameter in enumerate(model.parameters()) if parameter.grad is not None]
            assert part.numel() >= sum(list(model.parameters())[index].numel() for index in there) > 0
            held += there
        assert sorted(held) == list(range(len(list(model.parameters())))), "each parameter in one part"
        assert len(waited) > 2 and waited[-1] == 1 + len(layout.buckets)
        for parameter, wanted in zip(model.parameters(), expected(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted)


def test_a_rank_without_samples_sends_its_loss_in_the_exchange():
    reducer, recorder, _ = streamed(network())
    reducer.begin()
    assert reducer.exchange(0.25).loss == 0.25
    assert recorder.sent[0] == (reducer.flat_gradients.layout.gradients, reducer.flat_gradients.layout.length)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 3))


def loss(model: nn.Module, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    value: torch.Tensor = model(torch.randn(5, 2, 6, 6)).square().mean()
    return value


def expected(seeds: tuple[int, ...] = (1,)) -> list[torch.Tensor]:
    model = network()
    for seed in seeds:
        loss(model, seed).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_numbers_are_shown_before_they_are_read():
    model = network()
    reducer, _ = make(model)
    reducer.needs_norm = True
    shown: list[torch.Tensor] = []
    reducer.begin()
    assert reducer.before_reading(shown.append)
    value = loss(model)
    value.backward()
    reducer.exchange(value.detach(), torch.tensor(0.5))
    (numbers,) = shown
    assert numbers[:3].tolist() == [value.item(), 0.5, 1.0] and numbers[SLOTS] == reducer.norm() > 0
    reducer.begin()
    reducer.exchange()
    assert len(shown) == 1, "for one update only"


def test_a_backward_pass_between_updates_sends_nothing():
    model = network()
    reducer, recorder = make(model, 64)
    for _ in range(2):
        reducer.begin()
        loss(model).backward()
        reducer.exchange()
        sent = len(recorder.sent)
        loss(model, 2).backward()  # a hook's, a metric's
        assert len(recorder.sent) == sent
    reducer.begin()
    loss(model).backward()
    reducer.exchange()
    assert len(recorder.sent) == 3 * sent // 2
    for parameter, wanted in zip(model.parameters(), expected(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


@pytest.mark.parametrize("bucket", [None, 64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_are_autograds_own(bucket, channels_last):
    model = network()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    reducer, recorder = make(model, bucket)
    for _ in range(3):
        reducer.begin()
        value = loss(model)
        value.backward()
        totals = reducer.exchange(value.detach())
        assert totals.loss == pytest.approx(value.item())
        for parameter, wanted in zip(model.parameters(), expected(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted)
            assert parameter.grad.stride() == parameter.stride()
            assert parameter.grad.untyped_storage().data_ptr() == recorder.flat.untyped_storage().data_ptr()
    assert recorder.finished == 3


def is_in(parameter: nn.Parameter, recorder: Recorder) -> bool:
    assert parameter.grad is not None
    return parameter.grad.untyped_storage().data_ptr() == recorder.flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("bucket", [None, 64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_large_gradients_stay_where_autograd_left_them(bucket, channels_last, passes):
    model = network()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    reducer, recorder = make(model, bucket, apart=100)
    kept: list[torch.Tensor] = []
    for _ in range(3):
        reducer.begin()
        for number in range(passes):
            reducer.last_backward = number == passes - 1
            loss(model, number).backward()
        reducer.exchange()
        kept += [model[3].weight.grad.clone(), model[3].weight.grad]
        for parameter, wanted in zip(model.parameters(), expected(tuple(range(passes))), strict=True):
            torch.testing.assert_close(parameter.grad, wanted)
            assert parameter.grad.stride() == parameter.stride()
            assert is_in(parameter, recorder) is (parameter.numel() < 100)
        before = torch.cat([one.grad.flatten() for one in model.parameters()])
        torch._foreach_mul_(reducer.gradients(), 0.5)
        torch.testing.assert_close(torch.cat([one.grad.flatten() for one in model.parameters()]), before / 2)
        model[3].weight.grad.copy_(kept[-2])
    for copy, one in zip(kept[::2], kept[1::2], strict=True):
        assert torch.equal(copy, one), "what a program kept of an update is not changed by the next"
    reducer.begin()
    model[4].weight.square().sum().backward()
    reducer.exchange()
    assert is_in(model[3].weight, recorder) and model[3].weight.grad.abs().sum() == 0


def test_complex_gradients_stay_too():
    model = nn.ParameterList([torch.ones(60, dtype=torch.complex64)])
    reducer, recorder = make(model, apart=100)
    reducer.begin()
    (model[0] * torch.arange(60)).abs().sum().backward()
    reducer.exchange()
    assert not is_in(model[0], recorder)
    (values,) = [one for one in reducer.gradients() if one.numel() >= 100]
    assert torch.equal(values, torch.view_as_real(model[0].grad).flatten())


def test_conjugates_are_copied():
    """Of a conjugate, PyTorch keeps the original and a mark."""
    weight = nn.Parameter(torch.randn(60, dtype=torch.complex64))
    reducer, _ = make(nn.ParameterList([weight]), apart=100)
    factors = torch.randn(60, dtype=torch.complex64)
    reducer.begin()
    (weight.conj() * factors).real.sum().backward()
    reducer.exchange()
    torch.testing.assert_close(weight.grad, factors)
    assert weight.grad is not None and not weight.grad.is_conj()


@pytest.mark.parametrize("other", ["activation", "hook", "type"])
def test_large_gradients_whose_memory_has_another_use_are_copied(other):
    weight = nn.Parameter(torch.ones(128, dtype=torch.float64 if other == "type" else torch.float32))
    reducer, recorder = make(nn.ParameterList([weight]), apart=100)
    if other == "hook":
        weight.register_post_accumulate_grad_hook(lambda _: None)
    reducer.begin()
    activation = torch.ones(128, requires_grad=True).exp()[None]  # its gradient is needed behind the weight's
    value = (activation + weight[None]) if other == "activation" else activation.detach() * weight
    value.sin().sum().backward()
    reducer.exchange()
    assert weight.grad is not None and not reducer.flat_gradients.elsewhere
    assert torch.equal(recorder.flat[:128].to(weight.dtype), weight.grad)


def test_one_rank_adds_and_scales_gradients_apart_that_autograd_has_in_the_same_memory():
    one, two = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    reducer = NoReducer([("one", one), ("two", two)])
    for passes in (1, 2):
        reducer.begin()
        for number in range(passes):
            reducer.begin_pass(number == passes - 1)
            (one[None] + two[None]).sin().sum().backward()
        reducer.exchange()
        torch._foreach_mul_(reducer.gradients(), 0.5)
        assert one.grad is not None and two.grad is not None
        assert one.grad.tolist() == two.grad.tolist() == [passes / 2] * 3


@pytest.mark.parametrize("cleared", [True, False])
def test_several_backward_passes_add_up(cleared):
    model = network()
    reducer, _ = make(model, 64)
    for _ in range(2):
        if cleared:
            reducer.begin()
        else:
            model.zero_grad(set_to_none=False)
        reducer.last_backward = False
        loss(model, 1).backward()
        reducer.last_backward = True
        loss(model, 2).backward()
        reducer.exchange()
        for parameter, wanted in zip(model.parameters(), expected((1, 2)), strict=True):
            torch.testing.assert_close(parameter.grad, wanted)


def test_buckets_leave_in_order_and_the_last_waits_for_the_loss():
    model = network()
    reducer, recorder = make(model, 64)
    bounds = [(bucket.begin, bucket.end) for bucket in reducer.flat_gradients.layout.buckets]
    assert len(bounds) > 2
    reducer.begin()
    loss(model).backward()
    assert recorder.sent == bounds[:-1]
    reducer.exchange()
    assert recorder.sent == bounds


def test_a_parameter_without_a_part_in_the_loss_contributes_zeros():
    model = network()
    reducer, recorder = make(model, 64)
    reducer.begin()
    model[4].weight.square().sum().backward()
    reducer.exchange()
    assert model[0].weight.grad.abs().sum() == 0
    assert len(recorder.sent) == len(reducer.flat_gradients.layout.buckets)


def test_a_bucket_waits_for_each_of_its_gradients_however_often_others_are_computed():
    """As by reentrant checkpoints of shared layers: a count of gradients would send it with last time's values."""
    used, unused, last = (nn.Parameter(torch.ones(16)) for _ in range(3))
    model = nn.ParameterList([last, unused, used])
    reducer, recorder = make(model, 32)
    reducer.begin()
    for factor in (1.0, 2.0):
        (factor * used).sum().backward()
    assert recorder.sent == []
    reducer.exchange()
    assert used.grad.eq(3).all() and unused.grad.eq(0).all()


def test_one_rank_gives_it_zeros_too_so_that_weight_decay_treats_it_alike():
    model = network()
    reducer = NoReducer(list(model.named_parameters()))
    reducer.begin()
    model[4].weight.square().sum().backward()
    reducer.exchange()
    assert model[0].weight.grad is not None and model[0].weight.grad.eq(0).all()


def test_a_second_backward_after_sending_is_refused():
    model = network()
    reducer, _ = make(model, 64)
    reducer.begin()
    loss(model, 1).backward()
    with pytest.raises(UserError, match="changed after it was sent"):
        loss(model, 2).backward()


def test_other_types_are_summed_in_the_buffers():
    model = nn.Linear(4, 3).to(torch.bfloat16)
    reducer, _ = make(model)
    reducer.begin()
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    reducer.exchange()
    assert model.weight.grad.dtype == torch.bfloat16
    assert model.weight.grad.eq(2).all()


def test_what_is_scaled_is_what_the_optimizer_reads_whatever_the_types():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).to(torch.bfloat16))
    reducer, _ = make(model)
    reducer.begin()
    (model[0](torch.ones(2, 4)).sum() + model[1](torch.ones(2, 3, dtype=torch.bfloat16)).sum()).backward()
    reducer.exchange()
    torch._foreach_mul_(reducer.gradients(), 0.5)
    assert all(parameter.grad is not None and parameter.grad.eq(1).all() for parameter in model.parameters())


def test_closing_gives_gradients_back_to_autograd():
    model = network()
    reducer, recorder = make(model)
    reducer.close()
    loss(model).backward()
    for parameter, wanted in zip(model.parameters(), expected(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
        assert parameter.grad.untyped_storage().data_ptr() != recorder.flat.untyped_storage().data_ptr()


def test_one_rank_divides_weighted_losses_too():
    model = network()
    reducer = NoReducer(list(model.named_parameters()))
    reducer.begin()
    loss(model).backward()
    assert reducer.exchange(6.0, 4.0).divisor == 4.0
    assert len(reducer.gradients()) == len(list(model.parameters()))
