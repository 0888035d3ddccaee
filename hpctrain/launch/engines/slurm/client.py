"""The only place that runs Slurm's commands, and short steps on a job's nodes, such as the preflight."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError, RunFailed, UserError
from hpctrain.launch.outage_retry import retry_outage
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import QueueEntry
from hpctrain.system import foreign_text
from hpctrain.system.processes import end_process

TIMEOUT_S = 60
"""Default timeout: a controller under load answers within a minute or not at all."""

SOON_S = 10
"""Timeout for answers that are needed soon: a job that Slurm is ending has half a minute left."""

END_S = 10
"""Seconds that a step gets to end after its timeout."""
DAEMON_S = 2
"""Seconds a node's daemon gets to accept a connection before the node counts as lost."""
CONNECTIONS = 64
"""Maximum number of simultaneous connections to daemons."""
COMMENT_CHARACTERS = 500
"""Maximum length of a job's comment, which is one line."""
ANSWER_S = 5
"""Timeout for commands that show a run's status, which work without Slurm's answer too."""

SEPARATOR = "|"
QUEUE_FIELDS = ("%A", "%F", "%K", "%T", "%M", "%L", "%l", "%N", "%S", "%r")
ACCOUNT_FIELDS = ("JobID", "JobIDRaw", "State", "ExitCode", "Elapsed", "Timelimit", "NodeList", "Start")


UNHEARD = re.compile(r"unable to contact slurm controller|connection refused", re.IGNORECASE)
"""Matches messages of Slurm's commands when no controller could be reached."""
UNANSWERED = re.compile(
    r"timed out|zero bytes were transmitted|standby mode|unexpected message received", re.IGNORECASE
)
"""Matches messages when the controller did not answer, though it may have received the request.

The last one is what scontrol requeue prints if there is no controller.
"""

NO_STEP = re.compile(r"srun: error: Unable to (confirm allocation|create step|allocate resources)")
"""Matches the start of srun's message when it cannot start a step."""

DISABLED = re.compile(r"operation is presently disabled", re.IGNORECASE)
"""Matches scontrol's message when the job or the site does not requeue."""

UNCONFIGURED = re.compile(r"establish a configuration source|failed to fetch config", re.IGNORECASE)
"""Matches what Slurm's commands say where they are installed and no Slurm is configured."""
UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)

INPUT = re.compile(r"(SLURM|SQUEUE|SCANCEL|SBATCH|SRUN|SALLOC|SACCT|SINFO|SCONTROL|PMIX)_")
"""Matches variables that Slurm's commands take for options, and those that describe the job of this process."""
WHERE = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Those that say which Slurm to ask, and who asks."""


class Unconfigured(RunFailed):
    """This machine belongs to no Slurm, although it has the commands."""


class NoSuchJob(RunFailed):
    """Slurm does not know the job, or has forgotten it."""


class Disabled(RunFailed):
    """The operation is disabled for this job or site."""


class Unanswered(RunFailed):
    """The controller did not answer and may have acted; repeat only requests that do no harm twice."""


class Unheard(Unanswered):
    """The controller could not be reached, so nothing has happened; the request may be repeated."""


@dataclass(frozen=True)
class Origin:
    """Where a job comes from, as recorded in Slurm."""

    name: str
    command: str
    """Path of its script, followed by the script's arguments."""
    folder: str
    """Working folder: where it was submitted, or --chdir."""
    output: str
    """Path of its log."""
    comment: str = ""


def find(program: str) -> str:
    """Returns the path of one of Slurm's commands; raises UserError if it is not on PATH."""
    path = shutil.which(program)
    if path is None:
        fix = "run this on a login node of the cluster; hpctrain render and hpctrain run need no Slurm"
        raise UserError(f"Slurm's {program} is not on PATH", fix)
    return path


def environment() -> dict[str, str]:
    """Returns the environment for Slurm's commands: without variables that would filter answers or alter requests."""
    env = {name: value for name, value in os.environ.items() if name in WHERE or not INPUT.match(name)}
    return env | {"SLURM_TIME_FORMAT": "standard"}  # times are compared (who_ends)


def forget_srun_options() -> None:
    """Removes variables that srun takes for options, as an interactive allocation may have: its steps are the run's."""
    for name in [name for name in os.environ if name.startswith("SRUN_")]:
        del os.environ[name]


def run(words: Sequence[str], timeout_s: float = TIMEOUT_S, **variables: str) -> str:
    """Runs a command and returns what it prints; raises RunFailed, or a subclass, with Slurm's message."""
    command, env = [find(words[0]), *words[1:]], environment() | variables
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        fix = "try again when Slurm answers"
        raise Unanswered(f"{words[0]} did not answer within {timeout_s:.0f} s", fix) from error
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        kinds = {
            UNCONFIGURED: Unconfigured,
            UNHEARD: Unheard,
            UNANSWERED: Unanswered,
            UNKNOWN_JOB: NoSuchJob,
            DISABLED: Disabled,
        }
        other = Unanswered if done.returncode < 0 else RunFailed  # Slurm signals all processes of a job that it ends
        failed = next((kind for pattern, kind in kinds.items() if pattern.search(message)), other)
        raise failed(f"{words[0]} refused: {message}", _advice(message))
    return done.stdout


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """Submits a script and returns the job id."""
    said = run(["sbatch", "--parsable", *options, str(script)])
    # Sites print greetings and checks before the number.
    if not (numbers := re.findall(r"^(?:Submitted batch job )?(\d+)(?:;\S*)?$", said, re.MULTILINE)):
        raise RunFailed(f"sbatch printed no job id: {' '.join(said.split())[-300:]}", "see squeue --me")
    return str(numbers[-1])


def queue(ids: Sequence[str], timeout_s: float = TIMEOUT_S) -> list[QueueEntry]:
    """Queries the queue; jobs that it has forgotten are missing. An array's number gives its elements."""
    if not ids:
        return []
    words = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(ids)}"]
    try:
        text = run([*words, f"--format={SEPARATOR.join(QUEUE_FIELDS)}"], timeout_s)
    except NoSuchJob:
        return []
    return [parse_queue(line) for line in text.splitlines() if line.count(SEPARATOR) >= len(QUEUE_FIELDS) - 1]


def parse_queue(line: str) -> QueueEntry:
    """Parses one line of squeue's output with QUEUE_FIELDS."""
    # The reason comes last: it is free text.
    job, array, task, state, elapsed, left, limit, nodes, start, reason = line.strip().split(SEPARATOR, 9)
    name = f"{array}_{task}" if task not in ("N/A", "") else job
    return QueueEntry(name, state, "" if reason == "None" else reason, elapsed, left, limit, nodes, start)


def own_scripts(timeout_s: float = ANSWER_S) -> dict[str, tuple[str, str]]:
    """Returns by job, for this user's jobs in the queue, ended ones too: its state, and its script with arguments."""
    words = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.geteuid()}", "--format=%i|%T|%o"]
    found = (line.strip().split(SEPARATOR, 2) for line in run(words, timeout_s).splitlines())
    return {each[0]: (each[1], each[2]) for each in found if len(each) > 2}


def accounted(ids: Sequence[str], timeout_s: float = TIMEOUT_S) -> list[QueueEntry]:
    """Queries accounting (sacct) about jobs; empty if the site has none or it does not answer."""
    if not ids or shutil.which("sacct") is None:
        return []
    words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(ids)}"]
    try:
        text = run([*words, f"--format={','.join(ACCOUNT_FIELDS)}"], timeout_s)
    except RunFailed:
        return []
    entries = []
    for line in text.splitlines():
        if line.count("|") != len(ACCOUNT_FIELDS) - 1:
            continue  # a greeting of the site
        job, _, state, code, elapsed, limit, nodes, start = line.split("|")
        reason = "" if code == "0:0" else f"exit code {code}"
        entries.append(QueueEntry(job, state.split()[0] if state else "", reason, elapsed, "", limit, nodes, start))
    return entries


def cancel(ids: Sequence[str], pending_only: bool = False) -> None:
    """Cancels jobs; jobs that have already ended are not an error."""
    run(["scancel", *(["--state=PENDING"] if pending_only else []), *ids])


def requeue(job: str) -> None:
    """Puts a running job back into the queue; Slurm then ends its processes."""
    run(["scontrol", "requeue", job])


def comment(job: str, text: str) -> None:
    """Sets the job's comment, which squeue and scontrol show; raises RunFailed if Slurm refuses it."""
    run(["scontrol", "update", f"JobId={job}", f"Comment={foreign_text.line(text, COMMENT_CHARACTERS)}"], SOON_S)


def hosts(nodelist: str) -> list[str]:
    """Expands Slurm's compact notation into host names: n[1-2] -> n1, n2."""
    return run(["scontrol", "show", "hostnames", nodelist]).split()


def job_fields(job: str) -> dict[str, str]:
    """Returns the fields of ``scontrol show job``; empty if Slurm has forgotten the job or does not answer soon.

    Times are in UTC.
    """
    try:
        text = run(["scontrol", "--oneliner", "show", "job", job], SOON_S, TZ="UTC")
    except HpctrainError:
        return {}
    return parse_fields(text)


def unreached(hosts: Collection[str]) -> set[str]:
    """Returns the nodes whose Slurm daemon cannot be reached; none if the daemons' addresses are unknown."""
    if not hosts:
        return set()
    try:
        text = run(["scontrol", "--oneliner", "show", "node", ",".join(sorted(hosts))], SOON_S)
        nodes = [parse_fields(line) for line in text.splitlines() if line]
        port = "" if all("Port" in node for node in nodes) else parse_port(run(["scontrol", "show", "config"], SOON_S))
        places = {node["NodeName"]: (node["NodeAddr"], int(node.get("Port") or port)) for node in nodes}
    except (HpctrainError, KeyError, ValueError):
        return set()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return {host for host, reached in zip(places, pool.map(_listens, places.values()), strict=True) if not reached}


def _listens(place: tuple[str, int]) -> bool:
    """Whether something listens at this address and port; true if the name cannot be resolved here."""
    try:
        socket.create_connection(place, DAEMON_S).close()
    except OSError as error:
        return isinstance(error, socket.gaierror)
    return True


def parse_port(text: str) -> str:
    """Returns the daemons' port from ``scontrol show config``; empty if it is not given."""
    found = re.search(r"^SlurmdPort\s*=\s*(\d+)", text, re.MULTILINE)
    return found[1] if found else ""


def parse_fields(text: str) -> dict[str, str]:
    """Parses a line of scontrol. If a name occurs twice the first one counts, as free text (comments) comes last."""
    return dict(reversed(re.findall(r"(?:^|\s)(\w+(?::\w+)?)=(\S*)", text)))


@functools.cache
def origin(job: str) -> Origin | None:
    """Returns the origin of a job, or of all elements of an array; None if Slurm has forgotten it."""
    try:
        return parse_origin(run(["scontrol", "show", "job", job]))
    except NoSuchJob:
        return None


def parse_origin(text: str) -> Origin:
    """Parses the first job in scontrol's output. These fields end their lines and come before any free text."""
    names = ("JobName", "Command", "WorkDir", "StdOut", "Comment")
    found = [re.search(rf"\b{name}=(.*)$", text, re.MULTILINE) for name in names]
    return Origin(*(match[1] if match else "" for match in found))


def unheard(text: str) -> str | None:
    """Returns srun's message if it could not start a step because the controller did not answer; else None.

    Also works on mpirun's output, as mpirun starts its daemons by srun.
    """
    lines = (line.strip() for line in text.splitlines() if NO_STEP.search(line))
    return next((line for line in lines if UNHEARD.search(line) or UNANSWERED.search(line)), None)


def mpi_types() -> list[str]:
    """Returns the MPI types that ``srun --mpi`` accepts here."""
    words = [find("srun"), "--mpi=list"]
    try:
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"srun did not answer within {TIMEOUT_S:.0f} s", "try again when Slurm answers") from error
    return parse_mpi_types(done.stdout + done.stderr)


def parse_mpi_types(text: str) -> list[str]:
    """Parses ``srun --mpi=list``: one name per line, and versions of PMIx after a colon."""
    names = re.findall(r"^\s*(?:srun:\s+)?(\w+)$", text, re.MULTILINE)
    versions = re.findall(r"available:\s*(.+)$", text, re.MULTILINE)
    return names + [name for found in versions for name in re.findall(r"\w+", found)]


def _advice(message: str) -> str:
    """Returns advice on common refusals."""
    table = {
        "node count": "lower launch.nodes, or take a larger partition: sinfo shows how many nodes each has",
        "reservation": "set launch.slurm.reservation to one that scontrol show reservation lists",
        "qos policy": "a limit of the account or QOS is reached: wait, or ask for less (sacctmgr show qos)",
        "invalid account": "set launch.slurm.account to one that sacctmgr show assoc user=$USER lists",
        "invalid partition": "set launch.slurm.partition to one that sinfo lists",
        "invalid qos": "set launch.slurm.qos to one that sacctmgr show qos lists",
        "time limit": "lower launch.slurm.time to what sinfo shows as the partition's limit; runs continue by requeue",
        "node configuration is not available": "lower launch.nodes, ranks_per_node, slurm.memory or gpus_per_node",
        "invalid generic resource": "check launch.slurm.gpu_type and gpu_request against sinfo -o '%P %G'",
        "invalid feature": "set launch.slurm.constraint to features that sinfo -o '%P %f' lists",
        "memory specification": "change launch.slurm.memory, or skip --mem if the site forbids it",
        "unable to contact": "Slurm's controller is down or unreachable: try again, or ask the site",
        "invalid job id": "hpctrain status names the run's jobs",
    }
    return next(
        (fix for key, fix in table.items() if key in message.lower()),
        "hpctrain doctor checks the site; sbatch's manual explains the message",
    )


def heard(run: RunDir, words: Sequence[str], env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Runs a helper on the nodes, retrying while Slurm's controller is down; returns its exit code and output.

    Raises:
        RunFailed: the controller stays down.
        Stopped: a person stopped the run meanwhile.
    """

    def ask() -> tuple[int, str]:
        code, output = run_step(words, env, timeout_s)
        if code and (said := unheard(output)):
            raise Unheard(f"Slurm starts no step ({said})", "submit the run again when Slurm's controller is up")
        return code, output

    return retry_outage(ask, Unheard, run)


def begin_step(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Begins a step that runs as long as the job, and prints nothing."""
    silent = subprocess.DEVNULL
    return subprocess.Popen(words, stdin=silent, stdout=silent, stderr=silent)


def run_step(words: Sequence[str], env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Runs a helper on the nodes; returns its exit code and output. Ends it after ``timeout_s``."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env}
        ) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                end_process(process, END_S)
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")
