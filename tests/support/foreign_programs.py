"""Programs of others that are compared with their own launchers, and what they print."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.rank.convention import reserve_port
from tests.support.command import environment
from tests.support.mpi import Result, rank_command, run_in_group

PROGRAMS = Path(__file__).parents[1] / "dist" / "programs"
ALL = os.environ.get("HPCTRAIN_FOREIGN") == "all"
LIMIT_S = 240


def by_mpirun(file: str, *arguments: str) -> list[str]:
    """As for Horovod."""
    return rank_command(2, Path(file), *arguments)


def by_torchrun(*words: str) -> list[str]:
    """As for all that takes its variables."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]


def by_itself(*words: str) -> list[str]:
    """As for a program that starts its ranks."""
    return [sys.executable, *words]


def by_tf_config(*words: str) -> list[str]:
    """Two processes, each with the variable that tells it of the other."""
    holders = [reserve_port(), reserve_port()]
    hosts = [f"127.0.0.1:{holder.getsockname()[1]}" for holder in holders]
    for holder in holders:
        holder.close()  # TensorFlow's server shares its port with nobody
    told = [json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": at}}) for at in (0, 1)]
    first, second = (f"TF_CONFIG={shlex.quote(each)} {shlex.join([sys.executable, *words])}" for each in told)
    return ["sh", "-c", f"{second} & {first}; wait"]


@dataclass(frozen=True)
class Program:
    """One of them."""

    file: str
    own: Callable[..., list[str]]
    """The command by its own launcher."""
    arguments: Sequence[str] = ()
    across: Sequence[str] | None = None
    """Its arguments where each of its two ranks has a node; None: the same."""
    convention: str = "auto"
    """The value of launch.convention that it needs."""
    launcher: str = "auto"
    """The value of launch.launcher that it needs in a job."""

    def words(self, nodes: int = 1) -> list[str]:
        """The program's file and arguments."""
        arguments = self.arguments if nodes == 1 or self.across is None else self.across
        return [str(PROGRAMS / self.file), *arguments]

    def under_its_own_launcher(self, folder: Path) -> Result:
        """The program on two ranks of this machine, without us."""
        return run_in_group(self.own(*self.words()), environment(), folder, LIMIT_S)


KINDS = {
    "horovod-torch": Program("foreign_horovod_torch.py", by_mpirun),
    "horovod-keras": Program("foreign_horovod_keras.py", by_mpirun),
    "ddp": Program("foreign_ddp.py", by_torchrun),
    "fsdp": Program("foreign_ddp.py", by_torchrun, ["fsdp"]),
    "multiworker": Program("foreign_multiworker.py", by_tf_config, convention="tensorflow"),
    "lightning": Program("foreign_lightning.py", by_itself, ["2", "1"], across=["1", "2"], launcher="srun"),
    "accelerate": Program("foreign_accelerate.py", by_torchrun),
    "deepspeed": Program("foreign_deepspeed.py", by_torchrun),
}
"""The last three need env/foreign.txt."""
COMPARED = tuple(KINDS) if ALL else ("horovod-torch",)


def losses(text: str) -> list[str]:
    """What a program says of its steps or epochs, to the last digit."""
    return re.findall(r"^(?:step|epoch) \d+ loss \S+$", text, re.M)
