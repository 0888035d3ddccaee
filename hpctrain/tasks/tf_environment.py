"""TensorFlow's settings that must be made before a task's file may import it. Loads no framework."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from hpctrain.system.keras_backend import keras_backend

CHATTER = re.compile(
    rb"oneDNN custom operations are on|All log messages before absl::InitializeLog|optimized to use available CPU"
    rb"|To enable the following instructions|Could not find cuda drivers|Cannot dlopen some GPU libraries"
    rb"|Unable to register cu\w+ factory|failed call to cuInit"
)
"""Matches lines that TensorFlow writes to stderr on every start, regardless of its log level."""


def set_environment(threads: int | None, verbose: bool = False) -> None:
    """Sets thread counts, GPU memory growth, log level and Keras' backend for a later import of TensorFlow.

    TensorFlow reads the first two when it creates its first tensor, so call this before the task is loaded.

    Args:
        threads: compute threads of this rank; by default OMP_NUM_THREADS, or else TensorFlow's choice.
    """
    os.environ["KERAS_BACKEND"] = keras_backend()
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
