"""Programs of others that are compared with their own launchers, and what they print."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

from tests.slurm.cluster import free_ports
from tests.support.command import environment
from tests.support.mpi import Result, mpirun, run_in_group

PROGRAMS = Path(__file__).parents[1] / "dist" / "programs"
ALL = os.environ.get("HPCTRAIN_FOREIGN") == "all"
UNDER_MPIRUN = {"horovod-torch": ["foreign_horovod_torch.py"], "horovod-keras": ["foreign_horovod_keras.py"]}
UNDER_TORCHRUN = {"ddp": ["foreign_ddp.py"], "fsdp": ["foreign_ddp.py", "fsdp"]}
BY_TF_CONFIG = {"multiworker": ["foreign_multiworker.py"]}
"""Two processes, each with the variable that tells it of the other."""
COMPARED = (*UNDER_MPIRUN, *UNDER_TORCHRUN, *BY_TF_CONFIG) if ALL else ("horovod-torch",)
LIMIT_S = 240


def words(name: str) -> list[str]:
    """The program's file and arguments."""
    file, *arguments = (UNDER_MPIRUN | UNDER_TORCHRUN | BY_TF_CONFIG)[name]
    return [str(PROGRAMS / file), *arguments]


def convention(name: str) -> str:
    """The value of launch.convention that the program needs."""
    return "tensorflow" if name in BY_TF_CONFIG else "auto"


def under_its_own_launcher(name: str, folder: Path) -> Result:
    """The program on two ranks of this machine, without us."""
    file, *arguments = words(name)
    if name in UNDER_MPIRUN:
        return mpirun(2, Path(file), *arguments, timeout=LIMIT_S)
    if name in BY_TF_CONFIG:
        hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
        told = [json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": at}}) for at in (0, 1)]
        first, second = (f"TF_CONFIG={shlex.quote(each)} {shlex.join([sys.executable, file])}" for each in told)
        return run_in_group(["sh", "-c", f"{second} & {first}; wait"], environment(), folder, LIMIT_S)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_in_group([*torchrun, file, *arguments], environment(), folder, LIMIT_S)


def losses(text: str) -> list[str]:
    """What a program says of its steps or epochs, to the last digit."""
    return re.findall(r"^(?:step|epoch) \d+ loss \S+$", text, re.M)
