"""Flat weights of torch models: in dtypes that neither NumPy nor MPI adds, and after they have moved."""

import pytest
import torch

from hpctrain.backends.torch.flat_weights import TorchFlatWeights
from hpctrain.comm.group import Group
from hpctrain.reduce.outer_step import OuterStep
from hpctrain.train.state import Placement
from hpctrain.train.stateful import value_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_make_outer_steps_in_float32_and_load_what_was_saved(dtype):
    weights = torch.linspace(-1, 1, 6, dtype=dtype)
    flat = TorchFlatWeights(Group("ranks"), None, [weights[:4], weights[4:]])
    outer = OuterStep(flat, flat.weights(), 0.5, 0.9, 0)
    begin = outer.outer.clone()
    weights += 1
    own = weights.float()
    flat.set_weights(outer.end_round(flat.weights()))
    torch.testing.assert_close(outer.outer, begin + 0.5 * 1.9 * (own - begin))
    assert torch.equal(weights, outer.outer.to(dtype))
    saved = value_of(flat.state_tensor("outer", outer.outer, Placement.REPLICATED))
    assert torch.equal(flat.array(saved), outer.outer)


def test_weights_are_those_of_the_model_after_a_task_has_given_it_other_memory():
    layer = torch.nn.Linear(2, 2)
    flat = TorchFlatWeights(Group("ranks"), None, list(layer.parameters()))
    torch.nn.utils.vector_to_parameters(torch.arange(6.0), layer.parameters())
    assert flat.weights().tolist() == [0, 1, 2, 3, 4, 5]
    flat.set_weights(torch.ones(6))
    assert layer.weight.eq(1).all() and layer.bias.eq(1).all()
