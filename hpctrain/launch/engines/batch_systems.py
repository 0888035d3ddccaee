"""PBS, LSF, Grid Engine and Flux: how to find a job's hosts, run commands on them, and submit jobs."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpctrain.config.sections import LaunchConfig
from hpctrain.errors import UserError

TIMEOUT_S = 30.0
"""Timeout for querying a batch system's hosts, in seconds."""


@dataclasses.dataclass(frozen=True)
class BatchSystem:
    """A scheduler in whose job scripts ``hpctrain run`` is one of the commands."""

    title: str
    hosts_file: str
    """Environment variable with the path of a file whose lines start with a host, which may repeat; empty for none."""
    hosts_command: tuple[str, ...]
    """Command that prints the hosts, if there is no file."""
    remote_shell: str
    """See ``launch.remote_shell``. Ranks started by it belong to the job: its limits apply, and they end with it."""
    prefix: str
    """Prefix of directives in the job script."""
    directives: tuple[str, ...]
    """Templates with {name}, {log}, {nodes}, {ranks} and {cores} per node, and {total} ranks."""
    job: str
    """Environment variable with the job's number."""
    again: str
    """Command in the script that restarts the run after exit code 75."""
    submit: tuple[str, ...]
    """Command that reads the script from standard input and prints the job's number."""
    queue: tuple[str, ...]
    """Command that prints a line beginning with the {job}."""
    column: int
    """Column of the state in that line."""
    details: tuple[str, ...]
    """Command that prints everything about a {job}, including the path of its log."""
    cancel: tuple[str, ...]


RESUME = "hpctrain resume {folder}"
SYSTEMS: Mapping[str, BatchSystem] = {
    "pbs": BatchSystem(
        title="PBS",
        hosts_file="PBS_NODEFILE",
        hosts_command=(),
        remote_shell="pbs_tmrsh {host} {command}",
        prefix="#PBS",
        directives=(
            "-N {name}",
            "-S /bin/bash",
            "-l select={nodes}:ncpus={cores}:mpiprocs={ranks} -l place=scatter",
            "-j oe",
            "-o {log}",
        ),
        job="PBS_JOBID",
        again=RESUME,
        submit=("qsub",),
        queue=("qstat", "{job}"),
        column=4,
        details=("qstat", "-f", "{job}"),
        cancel=("qdel", "{job}"),
    ),
    "lsf": BatchSystem(
        title="LSF",
        hosts_file="LSB_DJOB_HOSTFILE",
        hosts_command=(),
        remote_shell="blaunch {host} {command}",
        prefix="#BSUB",
        directives=("-J {name}", "-n {total}", '-R "span[ptile={ranks}]"', "-o {log}", '-Q "75"'),
        job="LSB_JOBID",
        again="",
        submit=("bsub",),
        queue=("bjobs", "-noheader", "-o", "jobid stat", "{job}"),
        column=1,
        details=("bjobs", "-UF", "{job}"),
        cancel=("bkill", "{job}"),
    ),
    "gridengine": BatchSystem(
        title="Grid Engine",
        hosts_file="PE_HOSTFILE",
        hosts_command=(),
        remote_shell="qrsh -inherit -nostdin -V {host} {command}",
        prefix="#$",
        directives=("-N {name}", "-S /bin/bash", "-cwd", "-V", "-j y", "-o {log}", "-r y", "-notify"),
        job="JOB_ID",
        again="exit 99",
        submit=("qsub", "-terse"),
        queue=("qstat",),
        column=4,
        details=("qstat", "-j", "{job}"),
        cancel=("qdel", "{job}"),
    ),
    "flux": BatchSystem(
        title="Flux",
        hosts_file="",
        hosts_command=("flux", "hostlist", "--expand", "instance"),
        remote_shell="""sh -c 'exec flux exec -r "$(flux overlay lookup "$0")" "$@"' {host} {command}""",
        prefix="#flux:",
        directives=("--job-name={name}", "--nodes={nodes}", "--exclusive", "--output={log}"),
        job="FLUX_ENCLOSING_ID",
        again=RESUME,
        submit=("flux", "batch"),
        queue=("flux", "jobs", "-n", "-o", "{{id}} {{state}}", "{job}"),
        column=1,
        details=("flux", "job", "info", "{job}", "jobspec"),
        cancel=("flux", "cancel", "{job}"),
    ),
}


def on_hosts_of_the_job(launch: LaunchConfig, given: Mapping[str, str]) -> LaunchConfig:
    """Returns ``launch`` with the hosts of this process's job, if ``launch.engine`` names a batch system.

    Args:
        launch: section of the run file.
        given: environment variables of this process.

    Raises:
        UserError: this process is not in a job of that batch system.
    """
    system = SYSTEMS.get(launch.engine or "")
    if system is None:
        return launch
    try:
        hosts = hosts_of(system, given)
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
        what = f"launch.engine is {launch.engine}, and this process is in no {system.title} job: {reason}"
        raise UserError(what, "start hpctrain run in the job's script, or leave launch.engine out") from error
    return dataclasses.replace(launch, hosts=hosts, remote_shell=system.remote_shell, engine=None)


def hosts_of(system: BatchSystem, given: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the job's hosts in the batch system's order, each once. Raises KeyError, OSError, SubprocessError."""
    if system.hosts_file:
        lines = Path(given[system.hosts_file]).read_text(encoding="utf-8").splitlines()
        words = [line.split()[0] for line in lines if line.strip()]
    else:
        command = [*system.hosts_command]
        words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout.split()
    if not words:
        raise OSError("it names no hosts")
    return tuple(dict.fromkeys(words))
