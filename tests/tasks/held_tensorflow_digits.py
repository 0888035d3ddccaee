"""The digits; attempts wait behind a step, see ``Hold``."""

import dataclasses

from hpctrain import KerasTask
from hpctrain.tasks import tensorflow_digits
from tests.support.gate import Hold


def task(data: str = "data/digits", gate: str = "", at: int = 0) -> KerasTask:
    """``gate`` and the rest are those of ``Hold``."""
    return dataclasses.replace(tensorflow_digits.task(data), hooks=[Hold(gate, at)])
