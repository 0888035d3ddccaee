"""Models on the meta device begin with the weights of a file or a checkpoint; what nothing would fill is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain import BaseHook, StepResult, Training, UserError, fit, load_config
from hpctrain.backends.torch.strategies.meta_init import give_memory
from tests.tasks.valueless_tasks import on_meta, words, write_weights

pytestmark = pytest.mark.usefixtures("environment_of_a_run")


class Losses(BaseHook):
    """Of all steps."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, training: Training, result: StepResult) -> None:
        total, weight = result.sums()["loss"]
        self.found.append(float(total / weight))


def losses(given: list[str]) -> list[float]:
    """Of a run on one rank."""
    hook = Losses()
    fit(load_config(None, given), hooks=[hook])
    return hook.found


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    write_weights(tmp_path / "weights.safetensors", 8)
    return tmp_path / "weights.safetensors"


def test_a_model_without_values_trains_as_one_with_them(tmp_path, weights):
    keys = {"train__ema_decay": 0.9}
    wanted = losses(words(tmp_path, "plain", weights, 4, **keys))
    assert losses(on_meta(tmp_path, "meta", weights, 2, **keys)) == wanted[:2]
    assert losses(on_meta(tmp_path, "meta", weights, 4, **keys)) == wanted[2:], "from its checkpoint"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"task_args__buffer": "true"}, "the buffer 0.shift of the model has no values: the task made it on the meta"),
        ({"task_args__optimizer": "Adagrad"}, "Adagrad holds state from the start, and for parameters without values"),
    ],
)
def test_what_no_file_would_fill_is_refused(tmp_path, weights, keys, said):
    with pytest.raises(UserError, match=said):
        losses(on_meta(tmp_path, "meta", weights, 2, **keys))


def test_weights_that_are_to_keep_values_they_do_not_have_are_refused(tmp_path):
    write_weights(tmp_path / "some.safetensors", 8, without="4.bias")
    given = on_meta(tmp_path, "meta", tmp_path / "some.safetensors", 2, checkpoint__init_missing="['4.*']")
    with pytest.raises(UserError, match=r"some\.safetensors has no values for 4\.bias, and neither has the model"):
        losses(given)


def test_a_run_that_would_begin_without_values_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"0\.bias, 0\.weight, .* and 13 more of the model have no values"):
        losses(on_meta(tmp_path, "meta", None, 2))


def test_parameters_stay_the_same_objects():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].weight.note = "mine"
    held = model[0].weight
    give_memory(model, torch.device("cpu"))
    assert held is model[0].weight is model[1].weight
    assert torch.equal(held, torch.zeros(3, 3)) and held.requires_grad and held.note == "mine"
