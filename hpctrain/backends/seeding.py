"""Random states before a user's task function runs. Imports only the framework that the task has imported."""

from __future__ import annotations

import sys

from hpctrain.train.seeds import seed_python


def seed_task(seed: int, precision: str, local_rank: int) -> None:
    """Seeds Python, NumPy and each framework that is imported, the same on all ranks, and has it use this rank's GPU.

    Initial weights then do not depend on how many ranks there are. Keras layers are made for the precision (fp32, bf16,
    fp16) that they compute in.
    """
    seed_python(seed)
    if "torch" in sys.modules:
        from hpctrain.backends.torch.device import begin_task as begin_torch

        begin_torch(seed, local_rank)
    if "tensorflow" in sys.modules:
        from hpctrain.backends.tensorflow.runtime import begin_task

        begin_task(seed, precision, local_rank)
