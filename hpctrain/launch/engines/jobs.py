"""What was submitted for a run, with any scheduler: the script or object in its folder, and the record jobs.jsonl."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.loading import dump
from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError
from hpctrain.run.folder import RunDir
from hpctrain.system import safe_read
from hpctrain.system.files import append_bytes, write_atomically
from hpctrain.system.json_shape import is_time, maker, sound
from hpctrain.system.output import say

SCRIPT, LOGS = "job.sbatch", "logs"
"""In the run folder: the script that a Slurm job is submitted with, and the folder of its log."""
REFUSAL = "refused.txt"
"""In the run folder: why the scheduler did not take its last job."""
JOB = re.compile(r"\d+(_\d+)?", re.ASCII)
"""A job of Slurm, or an element of an array."""
OTHER_JOB = re.compile(r"[A-Za-z0-9\u0192][A-Za-z0-9._/\[\]-]{0,200}")
"""A job of another scheduler: a word that does not look like an option of a command."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that is ready to be submitted; nothing has been written yet."""

    config: Config
    run: RunDir
    script: str
    elements: tuple[Config, ...] = ()
    """Runs of an array; each has its own folder below the array's."""
    name: str = SCRIPT
    """Of the script's file."""
    secret: str = ""
    """What is submitted, if that is not the script: with keys, which go into no file."""
    job: str = ""
    """Its name, if that is known before."""

    @property
    def script_file(self) -> Path:
        """The script's place in the run folder."""
        return self.run.path / self.name


@dataclasses.dataclass(frozen=True)
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
    engine: str = "slurm"
    """Scheduler that has the job: see ``schedulers``."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a command asks for beyond the run file; a scheduler refuses by name what it cannot do."""

    elements: Sequence[Config] = ()
    """The runs of a job array, whose folders below the run's have their numbers."""
    at_once: int | None = None
    """Elements that may run at the same time."""
    chain: int = 1
    """Jobs that follow each other."""
    after: Sequence[str] = ()
    """Jobs that must have ended well."""
    exclude: Sequence[str] = ()
    """Hosts not to use."""
    portable: bool = False
    """A script for any run file."""
    resumes: bool = False
    """The folder holds the run already."""

    def refuse(self, title: str) -> None:
        """For a scheduler that can do none of it. Raises UserError, by name."""
        plain, names = Wish(resumes=self.resumes), {"elements": "array", "at_once": "at-once"}
        for each in dataclasses.fields(self):
            wanted, usual = getattr(self, each.name), getattr(plain, each.name)
            if wanted != usual and (wanted or usual):
                name = names.get(each.name, each.name)
                raise UserError(f"jobs of {title} take no --{name}", "leave it out: with Slurm there is more")


def write(planned: Plan) -> None:
    """Makes the run folder with what the job will read."""
    planned.run.create()
    write_atomically(planned.script_file, planned.script.encode(), planned.run.path)
    for config in (*planned.elements, planned.config):
        run = RunDir.of(config.name, config.run_dir)
        run.create()
        write_atomically(run.run_yaml, dump(config).encode(), run.path)


def note(run: RunDir, submitted: Submitted) -> None:
    """``record`` for a job that is in the queue already: if it cannot be recorded, the user learns its number."""
    try:
        record(run, submitted)
    except RunFailed as error:
        ends = f"; scancel {submitted.job} ends the job" if submitted.engine == "slurm" else ""
        say(f"{error.what}\n  fix: {error.fix}{ends}")


def note_refusal(run: RunDir, what: str) -> None:
    """For ``status`` and ``explain``; the submitter sees it anyway."""
    with contextlib.suppress(RunFailed):
        write_atomically(run.path / REFUSAL, f"{what}\n".encode(), run.path)


def refusal(run: RunDir) -> str:
    """Why the scheduler did not take the run's last job, in its own words; empty if it did, or was never asked."""
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


def submissions(run: RunDir, engine: str | None = None) -> list[Submitted]:
    """All jobs of a run, or those of one scheduler, oldest first."""
    try:
        lines = safe_read.read(run.path / "jobs.jsonl").splitlines()
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge):
        return []
    return [found for found in map(_submitted, lines) if found and engine in (None, found.engine)]


def _submitted(line: bytes) -> Submitted | None:
    """None for a line that a full disk tore or somebody else wrote: what it names goes to the scheduler's commands."""
    try:
        found = _submitted_of(safe_read.parse_json(line))
    except ValueError:
        return None
    return found if found.engine != "slurm" or JOB.fullmatch(found.job) else None


def _is_job(value: object) -> bool:
    return isinstance(value, str) and OTHER_JOB.fullmatch(value) is not None


_submitted_of = maker(Submitted, job=sound(_is_job), time=sound(is_time), replaces=sound(_is_job))
