"""Refuses programs that start ranks themselves where hpctrain starts several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import UserError

LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed"),
    *("mpirun", "mpiexec", "srun", "horovodrun"),
)
"""Programs and Python modules that start ranks."""


def refuse_launcher(command: Sequence[str], ranks: int) -> None:
    """Refuses a launcher in ``launch.command``: each of several ranks would start all ranks of a separate run.

    Launchers with an option for several nodes (``torchrun --nnodes 2``) are accepted.

    Raises:
        UserError: it is one.
    """
    found = next((name for word in command[:3] for name in LAUNCHERS if Path(word).name == name), None)
    if found and ranks > 1 and not any(word.startswith(("--nnodes", "--num_machines")) for word in command):
        what = f"launch.command begins with {found}, which each of {ranks} ranks would start for a separate run"
        fix = "name the program itself ([python, train.py]), whose ranks get RANK and WORLD_SIZE; or start one rank"
        raise UserError(what, fix)
