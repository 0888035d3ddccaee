"""TensorFlow's process-wide settings: threads, GPU, log noise, seed, precision. Importing this loads no framework."""

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
"""Matches lines that TensorFlow writes to stderr on every start, regardless of its log level."""

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
"""Keras dtype policy of each precision."""


def set_environment(threads: int | None, verbose: bool = False) -> None:
    """Sets thread counts, GPU memory growth, log level and Keras' backend for a later import of TensorFlow.

    TensorFlow reads the first two when it creates its first tensor, so call this before the task is loaded.

    Args:
        threads: compute threads of this rank; by default OMP_NUM_THREADS, or else TensorFlow's choice.
    """
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    # Otherwise the first tensor takes all memory of all GPUs, even if a PyTorch task uses TensorFlow only for data.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    count = str(threads) if threads else os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit():
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", count)
        os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    if not verbose:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@contextlib.contextmanager
def without_chatter(verbose: bool = False) -> Iterator[None]:
    """Drops TensorFlow's start-up lines from stderr during its import; other lines appear when the block ends."""
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
    """Sets device, seed, names and precision before a task is made, for frameworks that are already imported.

    Automatic names are reset, so that a second model in the process gets the same names as the first.
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
    """Hides all GPUs but this rank's from TensorFlow, before its first tensor; see ``require_own_gpu``."""
    import tensorflow as tf

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
