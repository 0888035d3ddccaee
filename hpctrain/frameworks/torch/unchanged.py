"""Passes that leave no trace in a model: trials, rehearsals, and what layers are timed by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import Module

from hpctrain.frameworks.torch.holdings import Holdings
from hpctrain.frameworks.torch.state import load_random, random_tensors
from hpctrain.train.stateful import Kept, unchanged


@contextlib.contextmanager
def passes_leave(model: Module, holdings: Holdings, objects: Sequence[Kept], device: torch.device) -> Iterator[None]:
    """What passes in the body change in model, loss, the task's objects and random states is put back.

    Args:
        model: on its device.
        holdings: what the task's functions hold.
        objects: the task's, whose state is saved.
        device: of the model.
    """
    buffers_of = [(dict(module._buffers), module) for module in model.modules()]
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = {tensor.name: np.array(tensor.array) for tensor in random_tensors(device)}
    held = holdings.snapshot()
    try:
        with unchanged(objects, holdings.leaves):
            yield
    finally:
        for buffers, module in buffers_of:
            module._buffers.update(buffers)  # a forward pass may have put new tensors in their place
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        holdings.load(held)
        load_random(device, random)
