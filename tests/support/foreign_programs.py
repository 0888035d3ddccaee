"""Programs written for other launchers, run under their own launcher for comparison, and what they print."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.programs.plain_command import reserve_port
from tests.support.command import environment
from tests.support.mpi import Result, rank_command, run_in_group

PROGRAMS = Path(__file__).parents[1] / "dist" / "programs"
ALL = os.environ.get("HPCTRAIN_FOREIGN") == "all"
LIMIT_S = 240


def by_mpirun(file: str, *arguments: str) -> list[str]:
    """Command for MPI programs, such as Horovod's."""
    return rank_command(2, Path(file), *arguments)


def by_torchrun(*words: str) -> list[str]:
    """Command for programs that read torchrun's variables."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]


def by_itself(*words: str) -> list[str]:
    """Command for a program that starts its own ranks."""
    return [sys.executable, *words]


def by_tf_config(*words: str) -> list[str]:
    """Command for two processes that find each other through TF_CONFIG."""
    holders = [reserve_port(), reserve_port()]
    hosts = [f"127.0.0.1:{holder.getsockname()[1]}" for holder in holders]
    for holder in holders:
        holder.close()  # TensorFlow's server needs the port for itself
    told = [json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": at}}) for at in (0, 1)]
    first, second = (f"TF_CONFIG={shlex.quote(each)} {shlex.join([sys.executable, *words])}" for each in told)
    return ["sh", "-c", f"{second} & {first}; wait"]


@dataclass(frozen=True)
class Program:
    """A foreign program."""

    file: str
    own: Callable[..., list[str]]
    """Makes the command with its own launcher."""
    arguments: Sequence[str] = ()
    across: Sequence[str] | None = None
    """Arguments for two nodes with one rank each; None: the same ones."""
    convention: str = "auto"
    """Required value of launch.convention."""
    launcher: str = "auto"
    """Required value of launch.launcher in a job."""

    def words(self, nodes: int = 1) -> list[str]:
        """The program's file and arguments."""
        arguments = self.arguments if nodes == 1 or self.across is None else self.across
        return [str(PROGRAMS / self.file), *arguments]

    def under_its_own_launcher(self, folder: Path) -> Result:
        """Run the program on two ranks of this machine, without hpctrain."""
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
    """Lines in which a program prints the loss of a step or epoch, with all digits."""
    return re.findall(r"^(?:step|epoch) \d+ loss \S+$", text, re.M)
