"""The launcher of one attempt as a process: starts it, forwards its output, keeps its own messages, ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from hpctrain.launch.launcher_messages import Passing
from hpctrain.run.folder import RunDir
from hpctrain.system import processes
from hpctrain.system.files import open_log
from hpctrain.system.output import SHOWN_S, tell

TICK_S = 0.05
"""Seconds between two checks."""
KILL_GRACE_S = 5.0
"""Seconds between terminating a launcher and killing it; its descendants get as long after its end."""
KILLED_GRACE_S = 1.0
"""Seconds its descendants get after it was killed: tethers end ranks at once; a shell to a lost host never ends."""
LAST_PUMP_S = 10.0
"""Seconds that a slow terminal gets to take the rest of the ranks' output."""


@dataclass
class LauncherProcess:
    """mpirun, srun, or the only rank itself."""

    argv: Sequence[str]
    run_dir: RunDir
    attempt: int
    parent: int = 0
    """Process ID of the parent that forks the ranks, which outlives the launcher; 0 if there is none."""
    verbose: bool = False
    """Print the launcher's own messages."""
    process: subprocess.Popen[bytes] | None = None
    output: Passing | None = None
    was_killed: bool = False
    shown: int = 0
    """Number of characters of its messages that were printed."""

    def run(self, environment: Mapping[str, str], look: Callable[[float], object]) -> None:
        """Runs it to its end, calling ``look`` with the time every TICK_S. Its exit code tells nothing of the ranks."""
        others = processes.descendants()  # children of the shell that this process replaced by exec
        processes.adopt_orphans()
        with self._open_log() as log:
            self.process = subprocess.Popen(
                list(self.argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
                # On SIGTERM mpirun and srun end their ranks. A preexec_fn is safe: this process has one thread.
                preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM),  # noqa: PLW1509
            )
        assert self.process.stdout is not None
        self.output = Passing(self.process.stdout, sys.stdout.fileno())
        try:
            while self.process.poll() is None:
                look(time.monotonic())
                time.sleep(TICK_S)
        finally:
            if self.process.poll() is None:
                processes.kill(self.process)
            grace_s = KILLED_GRACE_S if self.was_killed else KILL_GRACE_S
            processes.end_descendants(grace_s, others, self.parent)
            self.output.pump(LAST_PUMP_S)
            self.output.close()
            self.process.stdout.close()
            self.show_messages()

    @property
    def signal(self) -> int:
        """Signal that killed it; else 0."""
        return max(0, -((self.process and self.process.returncode) or 0))

    def terminate(self) -> None:
        """Asks it to end all ranks and itself."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        """Kills its process group; ranks in other sessions are tethered to it, or killed afterwards."""
        self.was_killed = True
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def forward_output(self) -> None:
        """Forwards what the ranks have printed."""
        if self.output is not None:
            self.output.pump()

    @property
    def banner(self) -> str:
        """The end of its standard output: that of rank 0, then MPICH's report of deaths."""
        return self.output.text if self.output is not None else ""

    @property
    def messages(self) -> str:
        """What it has written to standard error; empty if that cannot be read."""
        try:
            text = self.run_dir.log("launcher", self.attempt).read_text(errors="replace")
            return text.replace("\0", "")  # Open MPI ends its banners with one
        except OSError:
            return ""

    def show_messages(self) -> None:
        """With ``--verbose``, prints what it has written since the last look."""
        if self.verbose:
            text = self.messages
            tell(text[self.shown :], "", SHOWN_S)
            self.shown = len(text)

    def _open_log(self) -> IO[bytes]:
        """Opens the file for its messages; /dev/null if that fails."""
        try:
            log = open_log(self.run_dir.log("launcher", self.attempt), self.run_dir.path, fresh=True)
            return os.fdopen(log, "wb")
        except OSError:
            return open(os.devnull, "wb")
