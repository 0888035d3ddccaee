"""A rank whose plan has been built, but which does not train: its memory, and the end of its process group."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.optim import SparseAdam

from hpctrain.backends.torch.strategies.fsdp.fsdp_memory import at_a_time
from hpctrain.backends.torch.strategies.fsdp.sharded_model import FullySharded, gathering
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate, TensorSize, of_state
from hpctrain.backends.torch.strategies.parameter_traits import plain
from hpctrain.backends.torch.torch_framework import TorchFramework


def weighed(framework: TorchFramework, micro_batches: int) -> MemoryEstimate:
    """Returns what a rank holds after an update, without activations; its optimizers make a step with zeros."""
    for each in plain(framework.source.optimizer_state.every):
        layout = torch.sparse_coo if isinstance(each, SparseAdam) else torch.strided
        updated = [one for settings in each.param_groups for one in settings["params"]]
        for one in updated:
            one.grad = torch.zeros_like(one, layout=layout) if one.requires_grad else None
        # Without values, Adafactor fails in its update, when it has made its state.
        with contextlib.suppress(*[RuntimeError for one in updated if one.is_meta][:1]):
            each.step()
    found = of_state([TensorSize.of(one) for one in framework.state()], 0, framework.world.size)
    partition = framework.parts.partition
    if not isinstance(partition, FullySharded):
        return found
    compute = gathering(framework.model, framework.parts.compute)
    every = list(framework.model.parameters())
    gathered, new, waiting = at_a_time(every, partition.layers, compute, micro_batches, partition.keeps)
    parameters = found.parameters + gathered
    gradients = max(found.gradients, waiting) + new
    return dataclasses.replace(found, parameters=parameters, gradients=gradients)


@contextlib.contextmanager
def closing_default_group() -> Iterator[None]:
    """Closes ``torch.distributed`` after the body, if anything has opened it."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
