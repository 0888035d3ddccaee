"""Programs of others that are compared with their own launchers, and what they print."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.command import environment
from tests.support.mpi import Result, mpirun, run_in_group

PROGRAMS = Path(__file__).parents[1] / "dist" / "programs"
ALL = os.environ.get("HPCTRAIN_FOREIGN") == "all"
UNDER_MPIRUN = {"horovod-torch": ["foreign_horovod_torch.py"], "horovod-keras": ["foreign_horovod_keras.py"]}
UNDER_TORCHRUN = {"ddp": ["foreign_ddp.py"], "fsdp": ["foreign_ddp.py", "fsdp"]}
COMPARED = (*UNDER_MPIRUN, *UNDER_TORCHRUN) if ALL else ("horovod-torch",)
LIMIT_S = 240


def words(name: str) -> list[str]:
    """The program's file and arguments."""
    file, *arguments = (UNDER_MPIRUN | UNDER_TORCHRUN)[name]
    return [str(PROGRAMS / file), *arguments]


def under_its_own_launcher(name: str, folder: Path) -> Result:
    """The program on two ranks of this machine, without us."""
    file, *arguments = words(name)
    if name in UNDER_MPIRUN:
        return mpirun(2, Path(file), *arguments, timeout=LIMIT_S)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_in_group([*torchrun, file, *arguments], environment(), folder, LIMIT_S)


def losses(text: str) -> list[str]:
    """What a program says of its steps or epochs, to the last digit."""
    return re.findall(r"^(?:step|epoch) \d+ loss \S+$", text, re.M)
