"""The digits task in Keras, whose attempts wait at a gate (``Hold``)."""

import dataclasses

from hpctrain import KerasTask
from hpctrain.tasks import tensorflow_digits
from tests.support.gate import Hold


def task(data: str = "data/digits", gate: str = "", at: int = 0) -> KerasTask:
    """The task; ``gate`` and ``at`` are arguments of ``Hold``."""
    return dataclasses.replace(tensorflow_digits.task(data), hooks=[Hold(gate, at)])
