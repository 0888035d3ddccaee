"""Batch training of neural networks on HPC clusters: Horovod and MPI, HDF5, Slurm.

The names below are imported when they are first used, so that ``import hpctrain`` loads no framework and no MPI.
"""

import sys

if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == __name__
    and not sys.flags.safe_path
):
    # `python -m hpctrain` has put the current folder before the standard library, of which nothing has been imported
    # yet. While the package is looked for, argv holds -m and what follows the package's name.
    del sys.path[0]

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpctrain.comm.world import World, connect
    from hpctrain.tasks.definition import KerasTask, TorchTask

_HOMES = {
    "World": "hpctrain.comm.world",
    "connect": "hpctrain.comm.world",
    "TorchTask": "hpctrain.tasks.definition",
    "KerasTask": "hpctrain.tasks.definition",
}

__all__ = ["KerasTask", "TorchTask", "World", "__version__", "connect"]


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
