"""Sparse gradients of embeddings in PyTorch: which stay sparse, and what one process makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hpctrain.backends.torch.reduce.torch_reducers import measured_reducer  # noqa: E402
from hpctrain.backends.torch.state.optimizer import OptimizerPart, joined  # noqa: E402
from hpctrain.backends.torch.task.shares import sparse_parameters  # noqa: E402
from hpctrain.comm.world import alone  # noqa: E402 (after the skip)
from hpctrain.config.sections import ReduceConfig  # noqa: E402
from hpctrain.errors import UserError  # noqa: E402
from tests.tasks.torch_tasks import (  # noqa: E402
    Together,
    Words,
    adagrad,
    global_batches,
    make_framework,
    mean_loss,
    plain_sgd,
    sgd,
    sparse_adam,
    train,
    weighted_loss,
    words_forward,
)

optim = torch.optim


def framework_of(optimizer: Callable[..., Any], sparse: str = "auto", **settings: Any) -> Any:
    return make_framework(
        alone(), Words, optimizer=optimizer, forward=words_forward, reduce={"sparse": sparse}, **settings
    )


@pytest.mark.parametrize(
    ("optimizer", "stays"),
    [
        (plain_sgd, True),
        (adagrad, True),
        (sgd, False),  # momentum moves rows that were not looked up
        (lambda model: optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), False),
        (lambda model: optim.Adagrad(model.parameters(), weight_decay=0.1), False),
        (lambda model: optim.Adam(model.parameters()), False),
        (sparse_adam, True),
        (lambda model: Together(optim.SGD(model.parameters(), lr=0.1)), False),  # who knows what it does
        (lambda model: joined([optim.SGD(model.parameters(), lr=0.1)]), True),
    ],
)
def test_rows_stay_alone_where_that_changes_no_number(optimizer, stays):
    framework = framework_of(optimizer)
    train(framework, 1)
    assert framework.model.embedding.weight.grad.is_sparse is stays
    assert not framework.model.head.weight.grad.is_sparse
    assert framework.facts.gradient_bytes == 4 * (24 + 3 + 5 + (0 if stays else 400))


def test_what_was_not_made_sparse_or_is_frozen_is_left_alone():
    model = Words(sparse=False)
    parts = [OptimizerPart("", plain_sgd(model))]
    assert sparse_parameters(model, parts, "auto") == []
    model = Words()
    assert sparse_parameters(model, [OptimizerPart("", plain_sgd(model))], "densify") == []
    assert sparse_parameters(model.requires_grad_(False), [OptimizerPart("", plain_sgd(model))], "auto") == []


@pytest.mark.parametrize("loss", [mean_loss, weighted_loss])
@pytest.mark.parametrize("optimizer", [plain_sgd, adagrad])
def test_training_is_that_of_dense_gradients(optimizer, loss):
    losses, hashes = [], []
    for mode in ("auto", "densify"):
        framework = framework_of(optimizer, mode, loss=loss, clip_norm=0.1, ema_decay=0.9)
        losses.append(train(framework, 8, 2))
        hashes.append([tensor.value for tensor in framework.state() if tensor.name.startswith(("model/", "ema/"))])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    for ours, theirs in zip(*hashes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_sparse_adam_is_that_of_a_loop_written_by_hand():
    framework = framework_of(sparse_adam)
    model = copy.deepcopy(framework.model)
    optimizer = sparse_adam(model)
    wanted = []
    for batch in global_batches(8):
        optimizer.zero_grad()
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        loss = mean_loss(model(tensors), tensors)
        loss.backward()
        model.unused.grad = torch.zeros(5)  # as it is set where several ranks could not know that it has no part
        optimizer.step()
        wanted.append(float(loss.detach()))
    np.testing.assert_allclose(train(framework, 8), wanted, rtol=1e-6)


def test_state_of_sparse_adam_is_resumed():
    first = framework_of(sparse_adam)
    train(first, 3)
    arrays = {}
    for tensor in first.state():
        arrays[tensor.name] = np.zeros(tensor.shape, tensor.dtype)
        tensor.copy_into(arrays[tensor.name])
    second = framework_of(sparse_adam)
    second.load(arrays)
    assert train(first, 4) == train(second, 4)
    assert first.weights_hash() == second.weights_hash()


def scale_of(framework: Any) -> float:
    (trained,) = framework.parts.optimizer_steps.values()
    return float(trained.rule.scale)


def test_an_overflow_leaves_the_update_out():
    framework = framework_of(plain_sgd, precision="fp16")
    train(framework, 1)
    before, scale = framework.weights_hash(), scale_of(framework)
    batch = next(global_batches(1))
    framework.model.head.weight.data *= 1e6
    after = framework.weights_hash()
    framework.step([batch], 30)
    assert before != after == framework.weights_hash() and scale_of(framework) == scale / 2


def test_a_table_that_is_also_a_matrix_has_all_rows():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(3, 8, sparse=True)

        def forward(self, batch):
            return self.table(batch["words"] % 3).mean(1) @ self.table.weight.T

    losses = []
    for mode in ("auto", "densify"):
        framework = make_framework(alone(), Tied, optimizer=plain_sgd, forward=words_forward, reduce={"sparse": mode})
        losses.append(train(framework, 5))
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_sparse_adam_says_what_it_needs():
    with pytest.raises(UserError, match="sparse is densify"):
        framework_of(sparse_adam, "densify")
    with pytest.raises(UserError, match="which has 1 axes"):
        framework_of(lambda model: optim.SparseAdam(model.head.parameters()))
    with pytest.raises(UserError, match="weight is sparse"):
        train(framework_of(sgd, "refuse"), 1)


def test_in_a_loop_of_ones_own_tables_are_named():
    model = Words()
    for sparse in ((), (model.embedding.weight,)):
        reducer = measured_reducer(ReduceConfig(), alone(), model, lambda _: None, sparse=sparse)
        reducer.begin()
        model({"words": torch.zeros((2, 4), dtype=torch.int64)}).sum().backward()
        reducer.exchange()
        assert model.embedding.weight.grad.is_sparse is bool(sparse)
        reducer.close()


def test_a_list_of_optimizers_is_what_a_class_around_them_is():
    framework, wanted = framework_of(lambda model: joined(list(sparse_adam(model).inner))), framework_of(sparse_adam)
    for each in (framework, wanted):
        each.set_learning_rate(0.5)
    assert train(framework, 6) == train(wanted, 6)
    assert framework.weights_hash() == wanted.weights_hash()
    names = {tensor.name for tensor in framework.state()}
    assert {"optimizer/each.0.exp_avg/embedding.weight", "optimizer/each.1.exp_avg/head.bias"} <= names


def test_a_schedule_may_have_a_factor_for_each_optimizer_of_a_list():
    framework = framework_of(lambda model: joined(list(sparse_adam(model).inner)))
    framework.set_learning_rate([0.5, 0.25])
    assert [group["lr"] for group in framework.optimizer.param_groups] == [0.05 * 0.5, 0.01 * 0.25]
    assert framework.facts.learning_rate == 0.05 * 0.5
    with pytest.raises(UserError, match="3 factors for the 2 parameter groups"):
        framework.set_learning_rate([0.5, 0.25, 1.0])


class Speaking(optim.SGD):
    """Has methods of its own for its state, and so new groups once it has loaded it."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def speaking_list(model: Words) -> Any:
    """One that saves itself, and one that does not."""
    return joined([Speaking(model.embedding.parameters(), 0.1), optim.Adam(model.head.parameters(), 0.01)])


def test_rates_reach_each_optimizer_of_a_list_that_has_loaded_its_own_state():
    saved = {}
    for tensor in framework_of(speaking_list).state():
        saved[tensor.name] = np.empty(tensor.shape, tensor.dtype)
        tensor.copy_into(saved[tensor.name])
    framework = framework_of(speaking_list)
    framework.load(saved)
    framework.set_learning_rate([0.5, 0.25])
    optimizer = framework.optimizer
    assert [one.param_groups[0]["lr"] for one in optimizer.each] == [0.1 * 0.5, 0.01 * 0.25]
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.step()
    scheduler.step()
    assert optimizer.each[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 * 0.1)


def test_a_scheduler_finds_the_momentum_that_all_optimizers_of_a_list_have():
    model = Words()
    adams = joined([optim.SparseAdam(model.embedding.parameters()), optim.Adam(model.head.parameters())])
    optim.lr_scheduler.OneCycleLR(adams, max_lr=0.1, total_steps=10)
    assert [group["betas"][0] for group in adams.param_groups] == [0.95, 0.95]


def test_several_optimizers_are_copied_with_what_they_update():
    layer = torch.nn.Linear(2, 2)
    together = joined([optim.SGD([layer.weight], lr=0.1, momentum=0.9), optim.Adagrad([layer.bias], lr=0.2)])
    layer(torch.ones(1, 2)).sum().backward()
    together.step()
    twin, copied = copy.deepcopy((layer, together))
    assert [group["lr"] for group in copied.param_groups] == [0.1, 0.2]
    for model, optimizer in ((layer, together), (twin, copied)):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(twin.weight, layer.weight) and torch.equal(twin.bias, layer.bias)
    assert copied.param_groups[0]["params"][0] is twin.weight


def test_a_generator_of_optimizers_is_refused_with_the_list_to_write():
    with pytest.raises(UserError, match="optimizer of the task is a generator, which can be read only once") as caught:
        joined(optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    assert "optimizer=[" in caught.value.fix


def test_the_dry_call_leaves_tables_with_a_largest_norm_as_they_were():
    def bounded():
        model = Words(sparse=False)
        model.embedding.max_norm = 0.1
        return model

    framework, batch = make_framework(alone(), bounded, forward=words_forward), next(global_batches(1))
    before = framework.weights_hash()
    framework.dry_call(batch, [batch])
    assert framework.weights_hash() == before
