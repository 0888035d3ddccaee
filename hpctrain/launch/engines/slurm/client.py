"""Slurm's commands: the only place that runs them, and short steps on a job's nodes, such as the preflight."""

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
from hpctrain.launch.patience import patiently
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import QueueEntry
from hpctrain.system import foreign_text

TIMEOUT_S = 60
"""A controller under load answers within a minute or not at all."""

SOON_S = 10
"""For questions whose answer is of use only now: a job that Slurm ends has half a minute left."""

DAEMON_S = 2
"""Longest time until a daemon takes a connection, or its node counts as gone."""
CONNECTIONS = 64
"""To daemons at a time."""
COMMENT_CHARACTERS = 500
"""Of a verdict in a job's comment, which is one line."""
ANSWER_S = 5
"""For questions of people who look on: what the run folder knows is shown without Slurm's answer, too."""

SEPARATOR = "|"
QUEUE_FIELDS = ("%A", "%F", "%K", "%T", "%M", "%L", "%l", "%N", "%S", "%r")
ACCOUNT_FIELDS = ("JobID", "JobIDRaw", "State", "ExitCode", "Elapsed", "Timelimit", "NodeList", "Start")


UNHEARD = re.compile(r"unable to contact slurm controller|connection refused", re.IGNORECASE)
"""How Slurm's commands say that no controller answered."""
UNANSWERED = re.compile(
    r"timed out|zero bytes were transmitted|standby mode|unexpected message received", re.IGNORECASE
)
"""How they say that a controller under load has not answered: it may have heard them all the same.

scontrol requeue says the last of these if there is no controller.
"""

NO_STEP = re.compile(r"srun: error: Unable to (confirm allocation|create step|allocate resources)")
"""How srun begins to say why it starts nothing."""

DISABLED = re.compile(r"operation is presently disabled", re.IGNORECASE)
"""How scontrol says that a job, or the site, does not requeue."""

UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)


class NoSuchJob(RunFailed):
    """Slurm does not know the job, or has forgotten it."""


class Disabled(RunFailed):
    """Slurm does not do that for this job."""


class Unanswered(RunFailed):
    """It is unknown whether it happened: what does no harm twice may be tried again."""


class Unheard(Unanswered):
    """The controller is down, for a restart perhaps: nothing has happened, and the same may be tried again."""


@dataclass(frozen=True)
class Origin:
    """Where a job comes from, as recorded in Slurm."""

    name: str
    command: str
    """Path of its script, and the script's arguments."""
    folder: str
    """That it was submitted from, or starts in."""
    output: str
    """Path of its log."""


def find(program: str) -> str:
    """Path of one of Slurm's commands; raises UserError if there is none."""
    path = shutil.which(program)
    if path is None:
        raise UserError(
            f"Slurm's {program} is not on PATH",
            "run this on a login node of the cluster; hpctrain render and hpctrain run need no Slurm",
        )
    return path


def run(words: Sequence[str], timeout_s: float = TIMEOUT_S, env: Mapping[str, str] | None = None) -> str:
    """Runs one command and returns what it prints; raises RunFailed with Slurm's own words, or Unheard."""
    command = [find(words[0]), *words[1:]]
    env = {**(os.environ if env is None else env), "SLURM_TIME_FORMAT": "standard"}  # times are compared (who_ends)
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unanswered(
            f"{words[0]} did not answer within {timeout_s:.0f} s", "try again when Slurm answers"
        ) from error
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        kinds = {UNHEARD: Unheard, UNANSWERED: Unanswered, UNKNOWN_JOB: NoSuchJob, DISABLED: Disabled}
        failed = next((kind for pattern, kind in kinds.items() if pattern.search(message)), RunFailed)
        raise failed(f"{words[0]} refused: {message}", _advice(message))
    return done.stdout


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """Submits a script and returns the job id."""
    # From inside a job: what describes this one (its restarts, its ranks) is not the next one's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    said = run(["sbatch", "--parsable", *options, str(script)], env=env)
    # Sites print welcomes and checks before it.
    if not (numbers := re.findall(r"^(?:Submitted batch job )?(\d+)(?:;\S*)?$", said, re.MULTILINE)):
        raise RunFailed(f"sbatch names no job: {' '.join(said.split())[-300:]}", "squeue --me tells whether it waits")
    return str(numbers[-1])


def queue(ids: Sequence[str], timeout_s: float = TIMEOUT_S) -> list[QueueEntry]:
    """What the queue knows of these jobs; those it has forgotten are missing. An array's number gives its elements."""
    if not ids:
        return []
    words = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(ids)}"]
    try:
        text = run([*words, f"--format={SEPARATOR.join(QUEUE_FIELDS)}"], timeout_s)
    except NoSuchJob:
        return []
    return [parse_queue(line) for line in text.splitlines() if line.count(SEPARATOR) >= len(QUEUE_FIELDS) - 1]


def parse_queue(line: str) -> QueueEntry:
    """One line of squeue in our format."""
    # The reason comes last: it is free text.
    job, array, task, state, elapsed, left, limit, nodes, start, reason = line.strip().split(SEPARATOR, 9)
    name = f"{array}_{task}" if task not in ("N/A", "") else job
    return QueueEntry(name, state, "" if reason == "None" else reason, elapsed, left, limit, nodes, start)


def own_scripts() -> dict[str, str]:
    """Number and script, with its arguments, of each job of this user that the queue knows, ended ones included."""
    words = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.geteuid()}", "--format=%i|%o"]
    found = (line.strip().partition(SEPARATOR) for line in run(words, ANSWER_S).splitlines())
    return {job: command for job, separator, command in found if separator}


def accounted(ids: Sequence[str], timeout_s: float = TIMEOUT_S) -> list[QueueEntry]:
    """What accounting remembers of these jobs; nothing if the site has none."""
    if not ids or shutil.which("sacct") is None:
        return []
    words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(ids)}"]
    try:
        text = run([*words, f"--format={','.join(ACCOUNT_FIELDS)}"], timeout_s)
    except RunFailed:
        return []
    entries = []
    for line in text.splitlines():
        job, _, state, code, elapsed, limit, nodes, start = line.split("|")
        reason = "" if code == "0:0" else f"exit code {code}"
        entries.append(QueueEntry(job, state.split()[0] if state else "", reason, elapsed, "", limit, nodes, start))
    return entries


def cancel(ids: Sequence[str], pending_only: bool = False) -> None:
    """Ends jobs; those that are over already are no error."""
    run(["scancel", *(["--state=PENDING"] if pending_only else []), *ids])


def requeue(job: str) -> None:
    """Puts a running job back into the queue, which ends it here."""
    run(["scontrol", "requeue", job])


def comment(job: str, text: str) -> None:
    """Sets the job's comment, which squeue and scontrol show; raises RunFailed if Slurm refuses it."""
    run(["scontrol", "update", f"JobId={job}", f"Comment={foreign_text.line(text, COMMENT_CHARACTERS)}"], SOON_S)


def hosts(nodelist: str) -> list[str]:
    """Host names of Slurm's compact notation: n[1-2] -> n1, n2."""
    return run(["scontrol", "show", "hostnames", nodelist]).split()


def job_fields(job: str) -> dict[str, str]:
    """Fields of ``scontrol show job``; empty when the job is purged, or Slurm does not answer soon."""
    try:
        text = run(["scontrol", "--oneliner", "show", "job", job], timeout_s=SOON_S)
    except HpctrainError:
        return {}
    return parse_fields(text)


def unreached(hosts: Collection[str]) -> set[str]:
    """Nodes whose Slurm daemon cannot be reached from here; none if nothing says where they listen."""
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
    """Whether something does at this address and port, or the address is not known here."""
    try:
        socket.create_connection(place, DAEMON_S).close()
    except OSError as error:
        return isinstance(error, socket.gaierror)
    return True


def parse_port(text: str) -> str:
    """Where all daemons listen, of ``scontrol show config``; empty if it does not say."""
    found = re.search(r"^SlurmdPort\s*=\s*(\d+)", text, re.MULTILINE)
    return found[1] if found else ""


def parse_fields(text: str) -> dict[str, str]:
    """Fields of one line of scontrol; if a name occurs twice the first counts: comments come last."""
    return dict(reversed(re.findall(r"(?:^|\s)(\w+(?::\w+)?)=(\S*)", text)))


@functools.cache
def origin(job: str) -> Origin | None:
    """Where a job, or all elements of an array, come from; None if Slurm has forgotten it."""
    try:
        return parse_origin(run(["scontrol", "show", "job", job]))
    except NoSuchJob:
        return None


def parse_origin(text: str) -> Origin:
    """The first job in the lines of scontrol; these fields end their lines, and come before any free text."""
    found = [re.search(rf"{name}=(.*)$", text, re.MULTILINE) for name in ("JobName", "Command", "WorkDir", "StdOut")]
    return Origin(*(match[1] if match else "" for match in found))


def unheard(text: str) -> str | None:
    """What srun says if it could not start a step because the controller did not answer; None if it could.

    Text of mpirun is understood too: it starts its daemons by srun.
    """
    lines = (line.strip() for line in text.splitlines() if NO_STEP.search(line))
    return next((line for line in lines if UNHEARD.search(line) or UNANSWERED.search(line)), None)


def mpi_types() -> list[str]:
    """What ``srun --mpi`` takes here."""
    words = [find("srun"), "--mpi=list"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"srun did not answer within {TIMEOUT_S:.0f} s", "try again when Slurm answers") from error
    return parse_mpi_types(done.stdout + done.stderr)


def parse_mpi_types(text: str) -> list[str]:
    """Names in ``srun --mpi=list``: one a line, and versions of PMIx after a colon."""
    names = re.findall(r"^\s*(?:srun:\s+)?(\w+)$", text, re.MULTILINE)
    versions = re.findall(r"available:\s*(.+)$", text, re.MULTILINE)
    return names + [name for found in versions for name in re.findall(r"\w+", found)]


def _advice(message: str) -> str:
    """What to do about the refusals that people meet first."""
    table = {
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
    """Exit code and output of a helper on the nodes, which is started again while Slurm's controller is away.

    Raises:
        RunFailed: the controller stays away.
        Stopped: a person stopped the run meanwhile.
    """

    def ask() -> tuple[int, str]:
        code, output = run_step(words, env, timeout_s)
        if code and (said := unheard(output)):
            raise Unheard(f"Slurm starts no step ({said})", "submit the run again when Slurm's controller is up")
        return code, output

    return patiently(ask, Unheard, run)


def run_step(words: Sequence[str], env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output of a helper on the nodes; what hangs is ended, with its output until then."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env}
        ) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")
