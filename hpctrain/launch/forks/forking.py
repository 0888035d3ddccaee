"""Starts the process that forks a run's ranks on this machine, and gives the command that mpirun runs instead."""

from __future__ import annotations

import ast
import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.run.events import RunStarted
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from hpctrain.system import processes, python
from hpctrain.system.keras_backend import keras_backend

STAND_IN = Path(__file__).with_name("stand_in.py")
FORKS = "HPCTRAIN_FORKS"
"""Environment variable: 0 disables forking, so each rank imports everything itself."""
COMMON = ("hpctrain.commands.train", "hpctrain.rank.fit", "hpctrain.rank.session", "mpi4py")
"""Modules that every rank imports. mpi4py.MPI is left out, because importing it initializes MPI."""
TORCH, KERAS = "hpctrain.backends.torch.task.opening", "hpctrain.backends.tensorflow.task.keras_opening"
KERAS_ON_TORCH = "hpctrain.backends.torch.keras.keras_adapter"
BACKENDS = {"torch": TORCH, "TorchTask": TORCH, "tensorflow": KERAS, "keras": KERAS, "KerasTask": KERAS}
"""Backend module, by a name that a task's file imports or the framework that an earlier attempt recorded."""


@dataclass
class Forking:
    """The parent process of a run's ranks; restarted if it has ended. Call ``close`` when done."""

    task: str
    run_dir: RunDir
    environment: Mapping[str, str]
    """The ranks' environment, without what mpirun adds."""
    folder: str
    """Folder of the parent's socket, accessible to this user only. Empty: do not fork ranks."""
    process: subprocess.Popen[bytes] | None = None
    modules: Sequence[str] = ()
    """Modules that the parent imports."""

    def words(self, command: Sequence[str]) -> list[str]:
        """Returns what mpirun should start for each rank: the stand-in, or ``command`` itself if ranks are not forked.

        Starts the parent if needed, without waiting for its imports.
        """
        if self.folder and self.environment.get(FORKS) != "0":
            self.begin(command, [*COMMON, *self.backends()])
        if self.process is None:
            return list(command)
        return [sys.executable, "-I", "-S", str(STAND_IN), self.socket, *command[1:]]

    def backends(self) -> list[str]:
        """See ``backends``; on PyTorch, Keras tasks need another one."""
        found = backends(self.task, self.run_dir)
        return [KERAS_ON_TORCH if one == KERAS and keras_backend(self.environment) == "torch" else one for one in found]

    def begin(self, command: Sequence[str], modules: Sequence[str]) -> None:
        """Starts the parent, unless one with the same modules is running."""
        if self.process is not None and self.process.poll() is None and modules == self.modules:
            return
        self.close()
        words = python.module("hpctrain.launch.forks.parent", str(os.getpid()), ",".join(modules), shlex.join(command))
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.socket)
            listener.listen(1024)
            self.process = subprocess.Popen(
                words, env=self.environment, start_new_session=True, stdin=listener.fileno(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self.modules = modules

    @property
    def socket(self) -> str:
        """Path of the parent's socket."""
        return str(Path(self.folder, "forks"))

    @property
    def pid(self) -> int:
        """Process ID of the parent; 0 if there is none."""
        return self.process.pid if self.process is not None else 0

    def close(self) -> None:
        """Kills the parent, and with it all its ranks."""
        if self.process is not None:
            processes.kill(self.process)
            self.process = None
            Path(self.socket).unlink(missing_ok=True)


def backends(task: str, run_dir: RunDir) -> list[str]:
    """Returns the backend modules of the frameworks that the task's file imports at top level.

    If it imports none of them, returns that of the framework recorded by an earlier attempt. The file is parsed, not
    run, since it may change before the next attempt. If it uses the environment outside functions and classes, the list
    is empty: it may set variables that a framework reads on import, so each rank must do the import itself.
    """
    where = task.rpartition(":")[0]
    try:
        spec = None if where.endswith(".py") else python.spec_of(where)
        body = ast.parse(Path((spec and spec.origin) or where).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []  # the ranks will report it
    outside = [each for each in body if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    words = (vars(node).get("attr") or vars(node).get("name") for each in outside for node in ast.walk(each))
    if not {"environ", "putenv"}.isdisjoint(words):
        return []
    statements = [each for each in body if isinstance(each, (ast.Import, ast.ImportFrom))]
    names = [alias.name for each in statements for alias in each.names]
    names += [each.module or "" for each in statements if isinstance(each, ast.ImportFrom)]
    found = {BACKENDS.get(name.partition(".")[0]) for name in names} - {None}
    if not found:
        with contextlib.suppress(HpctrainError, OSError):
            started = RunView(run_dir.path).look().progress.newest(RunStarted)
            found = {BACKENDS.get(started.framework or "")} - {None} if started else set()
    return sorted(map(str, found))
