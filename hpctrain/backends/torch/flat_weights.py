"""All trained weights of a torch model as one flat tensor, for local training; see backends.local_training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hpctrain.backends.local_training import ALL, covered
from hpctrain.backends.torch.process_groups import ProcessGroup, broadcast
from hpctrain.backends.torch.reduce.gradients import as_real
from hpctrain.backends.torch.state.tensors import TorchTensor
from hpctrain.comm.group import Group
from hpctrain.system.array_types import Array


class TorchFlatWeights:
    """See backends.local_training.FlatWeights; tensors are on the model's device, or on the host without ``peers``.

    Args:
        group: the ranks, on a communicator that nothing else uses.
        peers: a process group of the same ranks, to be closed with this.
        parameters: the weights. Those of 16 bits are held and summed as float32.
    """

    state_tensor = TorchTensor

    def __init__(self, group: Group, peers: ProcessGroup | None, parameters: Sequence[Tensor]) -> None:
        self.group = group
        self.peers = peers
        self.parameters = parameters
        self.size = group.size
        self.sizes = [one.numel() for one in self.trained]
        self.device = torch.device("cpu") if peers is None else peers.device
        broadcast(group, self.trained, "receive the model", peers)
        self.dtype = functools.reduce(torch.promote_types, [one.dtype for one in self.trained], torch.float32)

    @property
    def trained(self) -> list[Tensor]:
        """The weights as real numbers, where they are now: a task may give them other memory (``.data = ...``)."""
        return [as_real(one.detach()) for one in self.parameters]

    def weights(self, at: slice = ALL) -> Tensor:
        trained, covers = self.trained, covered(self.sizes, at)
        flat = torch.cat([trained[index].reshape(-1)[part] for index, part, _ in covers])
        return flat.to(self.device, self.dtype)

    def set_weights(self, flat: Tensor, at: slice = ALL) -> None:
        trained = self.trained
        for index, part, place in covered(self.sizes, at):
            values = trained[index].reshape(-1)  # a copy if the memory order is another
            values[part] = flat[place]
            if not trained[index].is_contiguous():
                trained[index].copy_(values.view_as(trained[index]))

    def array(self, values: Array) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self.device, self.dtype)

    def begin_add(self, values: Tensor, what: str) -> Callable[[bool], bool]:
        if self.peers is None:
            return self.group.begin_add(values.numpy(), what)
        finish = self.peers.sum(values, what)

        def arrived(wait: bool) -> bool:
            if wait:
                finish()
            return wait

        return arrived

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
