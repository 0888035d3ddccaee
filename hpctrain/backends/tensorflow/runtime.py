"""TensorFlow's process-wide settings: threads, GPU, chatter, seed, precision. Importing this loads no framework."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from hpctrain.errors import UserError

CHATTER = re.compile(
    rb"oneDNN custom operations are on|All log messages before absl::InitializeLog|optimized to use available CPU"
    rb"|To enable the following instructions|Could not find cuda drivers|Cannot dlopen some GPU libraries"
    rb"|Unable to register cu\w+ factory|failed call to cuInit"
)
"""Lines that TensorFlow writes to stderr on every start, past its own log level."""

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
"""Keras dtype policy of each precision."""


def set_environment(threads: int | None, verbose: bool = False) -> None:
    """Thread counts, memory of GPUs, log level and Keras' backend, for a TensorFlow that is imported later.

    TensorFlow reads the first two when its first tensor is made, so this must come before the task is loaded.

    Args:
        threads: compute threads of this rank; by default OMP_NUM_THREADS, else what TensorFlow chooses.
    """
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    # Else the first tensor takes all memory of all GPUs, also if a PyTorch task uses TensorFlow for its data only.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    count = str(threads) if threads else os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit():
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", count)
        os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    if not verbose:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@contextlib.contextmanager
def without_chatter(verbose: bool = False) -> Iterator[None]:
    """Drops TensorFlow's start-up lines from stderr while it is imported; all else appears when the block ends."""
    if verbose:
        yield
        return
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not CHATTER.search(line)))


def begin_task(seed: int, precision: str = "fp32", local_rank: int = 0) -> None:
    """Device, seed, names and precision for a task that is about to be made; only what is imported is made ready.

    Names begin again, so that a second model of the process gets the same ones as the first.
    """
    if "tensorflow" in sys.modules:
        choose_gpu(local_rank)
    if "keras" not in sys.modules:
        return
    import keras

    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed % 2**32)
    keras.config.set_dtype_policy(POLICIES[precision])


def choose_gpu(local_rank: int) -> None:
    """Hides all GPUs but this rank's from TensorFlow. It must not have made a tensor yet; see ``require_own_gpu``."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        with contextlib.suppress(RuntimeError):  # it has begun: that does not harm a task of another framework
            tf.config.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")


def require_own_gpu(local_ranks: int) -> None:
    """Raises UserError if TensorFlow would put the models of all ranks of this node on the same GPU of several."""
    import tensorflow as tf

    seen = len(tf.config.list_logical_devices("GPU"))
    if seen > 1 and local_ranks > 1:
        raise UserError(
            f"TensorFlow was used before this rank could choose one of the {seen} GPUs that it sees",
            "import keras at the top of the task's module; make tensors, layers and optimizers in the task function",
        )
