"""The digits task in PyTorch, whose attempts wait at a gate (``Hold``)."""

import dataclasses

from hpctrain import TorchTask
from hpctrain.tasks import torch_digits
from tests.support.gate import Hold


def task(data: str = "data/digits", gate: str = "", at: int = 0, pause_s: float = 0.0) -> TorchTask:
    """The task; ``gate``, ``at`` and ``pause_s`` are arguments of ``Hold``."""
    return dataclasses.replace(torch_digits.task(data), hooks=[Hold(gate, at, pause_s)])
