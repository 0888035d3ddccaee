"""A debugging check that state declared equal on all ranks is equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpctrain.checkpoint.format.checksum import crc32
from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.comm.group import Group
from hpctrain.errors import RunFailed
from hpctrain.train.state import Placement, StateTensor


def verify_replicated(group: Group, tensors: Sequence[StateTensor], synchronize: Callable[[], None], step: int) -> None:
    """Raises RunFailed, on all ranks, if a tensor that should be equal on all of them is not. Collective; slow."""
    sums = {}
    for tensor in tensors:
        if tensor.placement in (Placement.REPLICATED, Placement.FIRST):
            value = np.empty(tensor.shape, ITEM_TYPES[tensor.dtype])
            tensor.copy_into(value)
            synchronize()
            sums[tensor.name] = crc32(value.tobytes())
    of_ranks = group.allgather(sums, "compare what should be equal")
    unequal = [name for name in sums if len({ranks_sums.get(name) for ranks_sums in of_ranks}) > 1]
    if unequal:
        raise RunFailed(
            f"{len(unequal)} tensors differ between ranks at step {step}: {', '.join(unequal[:5])}",
            "look for code that runs on some ranks only, or for random numbers that ranks do not share",
        )
