"""Values of which each rank of a group has a part, and the random numbers that they get.

All ranks of a tensor group draw the same random numbers, except for operations on such values. Those draw from a stream
of the rank's own, derived from the common one at each operation. So there is no more state to save, and a recomputation
that restores the common state draws the same again, wherever it begins.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.utils import _pytree as pytree

from hpctrain.backends.torch import accelerator
from hpctrain.train.seeds import derive

DRAWS = frozenset((
    "alpha_dropout", "alpha_dropout_", "bernoulli", "bernoulli_", "binomial", "cauchy_", "dropout", "dropout1d",
    "dropout2d", "dropout3d", "dropout_", "exponential_", "feature_alpha_dropout", "feature_alpha_dropout_",
    "feature_dropout", "feature_dropout_", "fractional_max_pool2d", "fractional_max_pool3d", "geometric_",
    "gumbel_softmax", "log_normal_", "multinomial", "native_dropout", "normal", "normal_", "poisson", "rand_like",
    "randint_like", "randn_like", "random_", "rrelu", "rrelu_", "scaled_dot_product_attention", "uniform_",
))  # fmt: skip
"""Names of functions that may draw random numbers for a tensor that they get."""
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""What operators of extensions are, such as attention with dropout: they may draw, too."""


@contextlib.contextmanager
def own_stream(rank: int, device: torch.device) -> Iterator[None]:
    """A context in which each rank of a group draws different random numbers; before, they must draw the same."""
    generators = accelerator.generators(device)
    seed = derive(int(torch.randint(2**62, (), device="cpu")), rank)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class SplitValues(Tensor):
    """A rank's part of values, and what is computed from it."""

    rank = 0
    """Of this rank in its group."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch; its results are parts too, whatever other types of tensors it gets."""
        call = functools.partial(super().__torch_function__, function, (cls,), args, kwargs or {})
        return (
            draw(cls.rank, call, (args, kwargs))
            if function.__name__ in DRAWS or isinstance(function, OPERATORS)
            else call()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: a model may keep parts, such as tables of angles in their dtype, and be copied."""
        return plain(self).__deepcopy__(memo)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves a plain tensor: the class is made in each process."""
        return plain(self).__reduce_ex__(protocol)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # states of generators cannot be compiled
def draw(rank: int, call: Any, given: Any) -> Any:
    """Calls a function that draws random numbers for parts of values among what is given."""
    device = next(one.device for one in pytree.tree_leaves(given) if isinstance(one, SplitValues))
    with own_stream(rank, device):
        return call()


@functools.cache
def of_rank(rank: int) -> type[SplitValues]:
    """The class of this rank's parts."""
    return type(SplitValues.__name__, (SplitValues,), {"rank": rank})


def take_in_compiled_functions() -> None:
    """Lets functions of a task that are compiled get parts: a check of PyTorch's would refuse any subclass."""
    if hasattr(torch._functorch.config, "check_custom_op_aliasing"):
        torch._functorch.config.check_custom_op_aliasing = False


def plain(values: Tensor) -> Tensor:
    """Values that all ranks have, as a plain tensor, after an exchange."""
    return values.as_subclass(Tensor) if isinstance(values, SplitValues) else values
