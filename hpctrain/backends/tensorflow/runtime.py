"""TensorFlow's process-wide settings before a task is made: GPU, seed, names, precision."""

from __future__ import annotations

import contextlib
import sys

from hpctrain.errors import UserError
from hpctrain.system.gpus import keep_own_instance


def begin_task(seed: int, precision: str = "fp32", local_rank: int = 0) -> None:
    """Sets device, seed, names and precision before a task is made, for frameworks that are already imported."""
    if "tensorflow" in sys.modules:
        choose_gpu(local_rank)
    if "keras" in sys.modules:
        from hpctrain.backends.keras.keras_model import begin_keras

        begin_keras(seed, precision)


def choose_gpu(local_rank: int) -> None:
    """Hides all GPUs but this rank's from TensorFlow, before its first tensor; see ``require_own_gpu``."""
    import tensorflow as tf

    keep_own_instance(local_rank)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        with contextlib.suppress(RuntimeError):  # already initialized: harmless for a task of another framework
            tf.config.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")


def require_own_gpu(local_ranks: int) -> None:
    """Raises UserError if TensorFlow would place all of this node's ranks on the same one of several GPUs."""
    import tensorflow as tf

    seen = len(tf.config.list_logical_devices("GPU"))
    if seen > 1 and local_ranks > 1:
        raise UserError(
            f"TensorFlow was used before this rank could choose one of the {seen} GPUs that it sees",
            "import keras at the top of the task's module; make tensors, layers and optimizers in the task function",
        )
