"""Jobs of PBS, LSF, Grid Engine and Flux: which hosts they have, and what runs a command on one of them."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpctrain.config.sections import LaunchConfig
from hpctrain.errors import UserError

PATIENCE_S = 30.0
"""For a batch system that is asked for the hosts."""


@dataclasses.dataclass(frozen=True)
class BatchSystem:
    """A scheduler with which hpctrain run is one command of the job's script."""

    title: str
    hosts_file: str
    """Variable with the path of the file whose lines begin with the hosts, one line or more each; empty for none."""
    hosts_command: tuple[str, ...]
    """What prints them if there is no file."""
    remote_shell: str
    """See ``launch.remote_shell``. Ranks that it starts are the job's: they count in its limits, and end with it."""
    prefix: str
    """Of the directives in a job's script."""
    directives: tuple[str, ...]
    """With {name}, {log}, {nodes}, {ranks} and {cores} of a node, {total} ranks."""
    job: str
    """Variable with the job's number."""
    again: str
    """What the script does if the run is to be started again, after exit code 75."""
    submit: tuple[str, ...]
    """Gets the script on standard input, and prints the job's number."""
    queue: tuple[str, ...]
    """Prints a line that begins with the {job}."""
    column: int
    """Of the state in that line."""
    details: tuple[str, ...]
    """Prints all about a {job}, the path of its log among it."""
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
    """With the hosts of the job that this process belongs to, if ``launch.engine`` names its batch system.

    Args:
        launch: of the run file.
        given: the variables of this process.

    Raises:
        UserError: this process is in no job of that batch system.
    """
    system = SYSTEMS.get(launch.engine or "")
    if system is None:
        return launch
    try:
        hosts = hosts_of(system, given)
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
        what = f"launch.engine is {launch.engine}, and this process is in no job of {system.title}: {reason}"
        raise UserError(what, "start hpctrain run in the job's script, or leave launch.engine out") from error
    return dataclasses.replace(launch, hosts=hosts, remote_shell=system.remote_shell, engine=None)


def hosts_of(system: BatchSystem, given: Mapping[str, str]) -> tuple[str, ...]:
    """In the batch system's order, each once. Raises KeyError, OSError, SubprocessError."""
    if system.hosts_file:
        lines = Path(given[system.hosts_file]).read_text(encoding="utf-8").splitlines()
        words = [line.split()[0] for line in lines if line.strip()]
    else:
        command = [*system.hosts_command]
        words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout.split()
    if not words:
        raise OSError("it names no hosts")
    return tuple(dict.fromkeys(words))
