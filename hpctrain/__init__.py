"""Batch training of neural networks on HPC clusters: Horovod and MPI, HDF5, Slurm.

The names in __init__.pyi are all that the docs and examples use; docs/stability.md says what they promise. Each is
imported when it is first used, so that ``import hpctrain`` loads no framework and no MPI. None has the name of a
subpackage, which would take its place when it is imported.
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

__version__ = "0.4.0"

_homes: dict[str, tuple[str, str]] = {}


def _find_homes() -> dict[str, tuple[str, str]]:
    """(module, attribute) of each public name, from the stub, which is read once."""
    if not _homes:
        with open(f"{__file__.removesuffix('c')}i", encoding="utf-8") as stub:
            for words in map(str.split, stub):
                if words[:1] == ["from"]:  # MODULE import ATTRIBUTE as NAME, or _NAME
                    _homes[words[5].lstrip("_")] = words[1], words[3]
    return _homes


def __getattr__(name: str) -> object:
    if name == "__all__":
        return __dir__()
    if name not in _find_homes():
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    module, attribute = _homes[name]
    return getattr(__import__(module, fromlist=[attribute]), attribute)


def __dir__() -> list[str]:
    return sorted([*_find_homes(), "__version__"])
