"""From a run file to a job in the queue: the run folder, the script in it, and a record of what was submitted."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.loading import dump, load
from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines.slurm import client, profile
from hpctrain.launch.engines.slurm.directives import require_whole_groups
from hpctrain.launch.engines.slurm.render import job_script, portable_script, render, signal_seconds
from hpctrain.run.events import CheckpointSaved, Train
from hpctrain.run.folder import RunDir
from hpctrain.run.job import ALIVE, QueueEntry
from hpctrain.run.view import RunView
from hpctrain.system import safe_read
from hpctrain.system.files import append_bytes, write_atomically
from hpctrain.system.json_shape import fits, is_count, is_time
from hpctrain.system.output import say

SCRIPT, LOGS = "job.sbatch", "logs"
"""In the run folder: the script that a job is submitted with, and the folder of its log."""
REFUSAL = "refused.txt"
"""In the run folder: why Slurm did not take its last job."""
JOB = re.compile(r"\d+(_\d+)?", re.ASCII)
"""A job, or an element of an array."""


@dataclass(frozen=True)
class Plan:
    """A run that is ready to be submitted; nothing has been written yet."""

    config: Config
    run: RunDir
    script: str
    elements: tuple[Config, ...] = ()
    """Runs of an array; each has its own folder below the array's."""

    @property
    def script_file(self) -> Path:
        """The script's place in the run folder."""
        return self.run.path / SCRIPT


@dataclass(frozen=True)
class Submitted:
    """One line of jobs.jsonl."""

    job: str
    time: float
    cwd: str
    """Folder that the job starts in: relative paths of the task are meant from there."""
    chain: int = 0
    """Place in a chain of jobs that follow each other."""
    replaces: str | None = None
    """Job that this one succeeds: to leave out hosts, or because the site does not requeue."""


def plan(
    config: Config, run: RunDir, array: Sequence[Sequence[str]] = (), at_once: int | None = None, chain: int = 1
) -> Plan:
    """Everything that a submission needs, checked; pure but for reading profiles, the run file and old events.

    Args:
        config: as loaded.
        run: its folder.
        array: override words of each element of a job array.
        at_once: elements that may run at the same time.
        chain: jobs that follow each other; more than one does not requeue.

    Raises:
        UserError: a value that Slurm cannot take, or ranks that share out layers on several nodes.
    """
    config = settle(config, run)
    if chain > 1:
        slurm = dataclasses.replace(config.launch.slurm, requeue=False)
        config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, slurm=slurm))
    elements = tuple(_element(config, run, index, words) for index, words in enumerate(array))
    indices = f"0-{len(array) - 1}" + (f"%{at_once}" if at_once else "") if array else None
    every = elements or (config,)
    for each in every:
        require_whole_groups(each)
    in_order, run_file = any(each.parallel.tensor > 1 for each in every), run.path if array else run.run_yaml
    job = job_script(config, run_file, run.logs, own_bin(), signal_s(config, run), indices, in_order)
    return Plan(config, run, render(job), elements)


def settle(config: Config, run: RunDir) -> Config:
    """The configuration that the job reads: profiles applied, paths absolute, so that it means the same anywhere."""
    module, colon, function = config.task.partition(":")
    task = f"{Path(module).absolute()}{colon}{function}" if module.endswith(".py") else config.task
    return dataclasses.replace(config, task=task, run_dir=str(run.path), launch=profile.resolve(config.launch))


def portable(config: Config) -> str:
    """A script for any run file with the same resources."""
    launch = profile.resolve(config.launch)
    return render(portable_script(dataclasses.replace(config, launch=launch), signal_seconds(launch)))


def signal_s(config: Config, run: RunDir) -> int:
    """The stop signal's lead, from what earlier attempts of this run measured."""
    events = RunView(run.path).events()
    steps = [sum(event.seconds_per_step().values()) for event in events if isinstance(event, Train) and event.steps]
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    saves = [(event.stall_s or 0.0) + (event.write_s or 0.0) for event in saved]
    return signal_seconds(config.launch, max(steps, default=None), max(saves, default=None))


def own_bin() -> Path:
    """Folder of the running Python environment's programs."""
    return Path(sys.executable).parent.absolute()


def write(planned: Plan) -> None:
    """Makes the run folder with what the job will read."""
    planned.run.create()
    write_atomically(planned.script_file, planned.script.encode(), planned.run.path)
    for config in (*planned.elements, planned.config):
        run = RunDir.for_config(config)
        run.create()
        write_atomically(run.run_yaml, dump(config).encode(), run.path)


def submit(
    planned: Plan,
    options: Sequence[str] = (),
    chain: int = 1,
    cwd: str | None = None,
    always: Sequence[str] = (),
) -> list[str]:
    """Submits a written plan; the job ids. Tells of jobs that cannot be noted in the run folder.

    Args:
        planned: what ``write`` has put into the run folder.
        options: more options of sbatch, such as a dependency.
        always: those that later jobs of a chain get too.
        chain: jobs that follow each other, each resuming where the last one stopped.
        cwd: folder that the job starts in; by default this one.

    Raises:
        RunFailed: Slurm refused; of a chain, its first jobs may wait all the same, and are named.
    """
    cwd = cwd or os.getcwd()
    ids: list[str] = []
    for place in range(chain):
        after = [f"--dependency=afterany:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else list(options)
        try:
            ids.append(client.submit(planned.script_file, [f"--chdir={cwd}", *always, *after]))
        except RunFailed as error:
            if not ids:
                if not isinstance(error, client.Unanswered):
                    _note_refusal(planned.run, error.what)
                raise
            what = f"{error.what}; before that job {', '.join(ids)} was submitted"
            raise RunFailed(what, f"{error.fix}; hpctrain cancel takes back what was submitted") from error
        (planned.run.path / REFUSAL).unlink(missing_ok=True)
        note(planned.run, Submitted(ids[-1], time.time(), cwd, place))
        for index, config in enumerate(planned.elements):
            note(RunDir.for_config(config), Submitted(f"{ids[-1]}_{index}", time.time(), cwd))
    return ids


def note(run: RunDir, submitted: Submitted) -> None:
    """``record`` for a job that is in the queue already: if it cannot be recorded, the user learns its number."""
    try:
        record(run, submitted)
    except RunFailed as error:
        say(f"{error.what}\n  fix: {error.fix}; scancel {submitted.job} ends the job")


def _note_refusal(run: RunDir, what: str) -> None:
    """For ``status`` and ``explain``; the person who submits is told anyway."""
    with contextlib.suppress(RunFailed):
        write_atomically(run.path / REFUSAL, f"{what}\n".encode(), run.path)


def refusal(run: RunDir) -> str:
    """Why Slurm did not take the run's last job, in Slurm's own words; empty if it did, or was never asked."""
    try:
        return safe_read.read(run.path / REFUSAL).decode(errors="replace").strip()
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge):
        return ""


def record(run: RunDir, submitted: Submitted) -> None:
    """Appends to jobs.jsonl.

    Raises:
        RunFailed: it cannot be written.
    """
    path = run.path / "jobs.jsonl"
    line = json.dumps(dataclasses.asdict(submitted)).encode() + b"\n"
    try:
        if append_bytes(path, line, run.path) == len(line):
            return
        why = "no space left on device"
    except OSError as error:
        why = str(error.strerror)
    raise RunFailed(f"job {submitted.job} cannot be noted in {path}: {why}", "free space there")


def submissions(run: RunDir) -> list[Submitted]:
    """All jobs of a run, oldest first."""
    try:
        lines = safe_read.read(run.path / "jobs.jsonl").splitlines()
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge):
        return []
    return [found for found in map(_submitted, lines) if found]


def _submitted(line: bytes) -> Submitted | None:
    """None for a line that a full disk tore or somebody else wrote: what it names goes to Slurm's commands."""
    try:
        saved = safe_read.parse_json(line)
        return Submitted(**saved) if _is_submitted(saved) else None
    except (ValueError, TypeError):
        return None


def _is_job(value: object) -> bool:
    return isinstance(value, str) and JOB.fullmatch(value) is not None


_is_submitted = fits({"job": _is_job, "time": is_time, "cwd": str, "chain": is_count, "replaces": (_is_job, None)})


def alive(run: RunDir) -> list[QueueEntry]:
    """Jobs of the run that wait or run."""
    return [entry for entry in client.queue([each.job for each in submissions(run)]) if entry.state in ALIVE]


def apart(run: RunDir, ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of these jobs those that are the run's, and a sentence about each of the others: no command may end these.

    Anyone who can write to the run folder may have written jobs.jsonl: Slurm itself must know a job as one that was
    submitted with this folder's script, or logs to it, or was given a run file that names it.
    """
    own, others = [], []
    for job in ids:
        origin = client.origin(job.partition("_")[0])
        if origin is not None and is_of(run, job, origin):
            own.append(job)
        elif origin is not None:
            whose = f"{origin.name!r} of {origin.folder}, and not known to be of {run.path}"
            others.append(f"job {job} is left alone: it is {whose} (scancel {job} ends it all the same)")
    return own, others


def is_element(run: RunDir, job: str) -> bool:
    """Whether a job is the element of an array that trains in this folder."""
    return run.path.name.isdigit() and job.endswith(f"_{run.path.name}")


def is_of(run: RunDir, job: str, origin: client.Origin) -> bool:
    """Whether a job was submitted for a run folder. Follows no link that lies in the folder."""
    folders = [run.path]
    if is_element(run, job):  # the script of an array lies above its elements
        folders.append(run.path.parent)
    script = Path(origin.command)
    if script.name == SCRIPT and any(_same(script.parent, folder) for folder in folders):
        return True
    log = Path(origin.output)
    if log.parent.name == LOGS and any(_shown_as(folder, log.parent.parent) for folder in folders):
        return True
    words = origin.command.split(" ")  # paths may hold blanks
    files = [Path(origin.folder, " ".join(words[begin:])) for begin in range(1, len(words))]
    return any(_same(_run_folder(file, origin.folder), run.path) for file in files if file.is_file())


def _run_folder(run_file: Path, cwd: str) -> Path | None:
    """The folder that a run file names, for a process that was started in ``cwd``."""
    try:
        config = load(run_file)
    except UserError:
        return None
    return Path(cwd, Path(config.run_dir or Path("runs") / config.name).expanduser())


def _shown_as(folder: Path, shown: Path) -> bool:
    """Whether scontrol shows a folder in this way: it fills numbers of jobs even into names with a percent sign."""
    filled = re.sub(r"%[AaJjs]", lambda found: rf"(?:{found[0]}|%\d+)", re.escape(str(folder)))
    return _same(shown, folder) or ("%" in str(folder) and re.fullmatch(filled, str(shown)) is not None)


def _same(one: Path | None, other: Path) -> bool:
    try:
        return one is not None and (one == other or one.samefile(other))
    except OSError:
        return False


def check_after(jobs: Sequence[str]) -> None:
    """Slurm itself begins a job at once whose dependency it does not know: it takes it for one that ended well.

    Raises:
        UserError: a job that Slurm does not know, or that has not ended well.
        RunFailed: Slurm does not tell.
    """
    if wrong := [job for job in jobs if not JOB.fullmatch(job)]:
        raise UserError(
            f"--after {wrong[0]} is not a job", "give numbers of jobs, as hpctrain submit --parsable prints them"
        )
    asked = client.queue(jobs)
    found = {job: [each for each in asked if job in (each.id, each.id.partition("_")[0])] for job in jobs}
    told = client.accounted([job for job in jobs if not found[job]])
    for job in jobs:
        states = [each.state for each in found[job] or told if job in (each.id, each.id.partition("_")[0])]
        if not states:
            fix = "correct the number; if that job has ended well long ago, leave --after out"
            raise UserError(f"--after {job}: Slurm knows no such job, and would begin at once", fix)
        if bad := [state for state in states if state not in (*ALIVE, "COMPLETED")]:
            fix = "resume that run first, and name its new job"
            raise UserError(f"--after {job}: that job is {bad[0]}, so this one would never begin", fix)


def goes_on(run: RunDir) -> bool:
    """Whether a job of the run waits or runs, for those who wait: a controller that is silent now is asked again."""
    try:
        return bool(alive(run))
    except RunFailed:
        return True


def refuse_second(run: RunDir) -> None:
    """Two jobs must not write one run folder."""
    for entry in alive(run):
        raise UserError(
            f"job {entry.id} of {run.path} is {entry.state} already",
            "wait for it, end it with hpctrain cancel, or give the new run another name",
        )


def sweep(words: Sequence[str]) -> list[list[str]]:
    """Override words of each element of an array.

    Args:
        words: files with one line of options an element (``--seed 3 --train.epochs 10``), or ``key=v1,v2,v3``; several
            of the latter make all combinations.
    """
    axes, elements = [], []
    for word in words:
        key, equals, values = word.partition("=")
        if equals and not os.path.exists(word):  # False also for a list that is too long for a file's name
            axes.append([[f"--{key.lstrip('-')}={value}"] for value in values.split(",")])
            continue
        try:
            lines = Path(word).read_text(encoding="utf-8").splitlines()
            elements += [
                shlex.split(line, comments=True) for line in lines if line.strip() and not line.lstrip().startswith("#")
            ]
        except (OSError, ValueError) as error:  # no text, or a quotation without an end
            why = getattr(error, "strerror", None) or error
            raise UserError(f"--array {word}: {why}", "give a file of options, or key=value,value") from error
    if axes:
        elements += [list(itertools.chain.from_iterable(point)) for point in itertools.product(*axes)]
    if words and not elements:
        raise UserError("--array names no elements", "give a file with one line of options an element")
    return elements


def _element(config: Config, run: RunDir, index: int, words: Sequence[str]) -> Config:
    """The run of one element: the array's configuration with its own options, name and folder."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump(config))
        file.flush()
        changed = load(file.name, words)
    return dataclasses.replace(changed, name=f"{config.name}-{index}", run_dir=str(run.path / str(index)))
