"""What was submitted for a run, with any scheduler: the script in its folder, and the record jobs.jsonl."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.config.loading import dump
from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError
from hpctrain.run.folder import RunDir
from hpctrain.system import safe_read
from hpctrain.system.files import append_bytes, write_all, write_atomically
from hpctrain.system.json_shape import is_time, maker, sound
from hpctrain.system.output import say
from hpctrain.system.retry import retry_files

SCRIPT, LOGS = "job.sbatch", "logs"
"""In the run folder: the script of Slurm jobs, and the folder of their logs."""
REFUSAL = "refused.txt"
"""In the run folder: why the scheduler refused the last submission, and a line with the fix."""
JOB = re.compile(r"\d+(_\d+)?", re.ASCII)
"""Number of a Slurm job or array element."""
OTHER_JOB = re.compile(r"[A-Za-z0-9\u0192][A-Za-z0-9._\[\]-]{0,200}")
"""Job of another scheduler: a word that cannot be taken for an option."""


@dataclasses.dataclass(frozen=True)
class SubmitOptions:
    """What a command asks for beyond the run file; a scheduler refuses options that it does not support."""

    elements: Sequence[Config] = ()
    """Runs of a job array; their folders below the run's are named by number."""
    at_once: int | None = None
    """Maximum number of elements that run at the same time."""
    chain: int = 1
    """Number of jobs that follow each other."""
    after: Sequence[str] = ()
    """Jobs that must have ended successfully first."""
    exclude: Sequence[str] = ()
    """Hosts not to use."""
    portable: bool = False
    """Make a script for any run file."""
    resumes: bool = False
    """Whether the folder already holds the run."""

    def refuse(self, title: str) -> None:
        """Raises UserError for any option that is set, for schedulers that support none of them."""
        plain = SubmitOptions(resumes=self.resumes)
        names = {"elements": "array", "at_once": "at-once"}
        for each in dataclasses.fields(self):
            wanted = getattr(self, each.name)
            usual = getattr(plain, each.name)
            if wanted != usual and (wanted or usual):
                name = names.get(each.name, each.name)
                raise UserError(f"jobs of {title} take no --{name}", "leave it out: only Slurm jobs have it")


NO_OPTIONS = SubmitOptions()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that is ready to be submitted; nothing has been written yet."""

    config: Config
    run: RunDir
    script: str
    elements: tuple[Config, ...] = ()
    """Runs of an array; each has its own folder below the array's."""
    name: str = SCRIPT
    """Name of the script's file."""
    options: SubmitOptions = NO_OPTIONS
    """The options of the command, for schedulers that support them."""

    @property
    def script_file(self) -> Path:
        """Path of the script in the run folder."""
        return self.run.path / self.name


@dataclasses.dataclass(frozen=True)
class Submitted:
    """One line of jobs.jsonl."""

    job: str
    time: float
    cwd: str
    """Folder in which the job starts; the task's relative paths refer to it."""
    chain: int = 0
    """Index in a chain of jobs."""
    replaces: str | None = None
    """Job that this one continues, to leave out hosts or because the site does not requeue."""
    engine: str = "slurm"
    """Scheduler of the job; see ``schedulers``."""


def write(planned: Plan) -> Callable[[], object]:
    """Makes the run folder, writes the files that the job will read; returns a function that puts back earlier ones."""
    planned.run.create()
    files = {planned.script_file: planned.script.encode()}
    for config in (*planned.elements, planned.config):
        run = RunDir.of(config.name, config.run_dir)
        run.create()
        files[run.run_yaml] = dump(config).encode()
    return write_all(files)


def note(run: RunDir, submitted: Submitted) -> None:
    """Records a job that is already in the queue; if that fails, tells the user its number instead of raising."""
    try:
        record(run, submitted)
    except RunFailed as error:
        ends = f"; scancel {submitted.job} ends the job" if submitted.engine == "slurm" else ""
        say(f"{error.what}\n  fix: {error.fix}{ends}")


def note_refusal(run: RunDir, why: RunFailed, undo: Callable[[], object]) -> None:
    """Stores why a submission was refused, for ``status`` and ``explain``; ``undo`` puts back the run's files."""
    with contextlib.suppress(RunFailed):  # the user sees it in any case
        undo()
        write_atomically(run.path / REFUSAL, f"{why.what}\n{why.fix}".encode(), run.path)


def refusal(run: RunDir) -> str:
    """Returns why the scheduler refused the run's last submission, and a line with the fix; empty if it did not."""
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
    raise RunFailed(f"job {submitted.job} cannot be recorded in {path}: {why}", "free space there")


def submissions(run: RunDir, engine: str | None = None) -> list[Submitted]:
    """Returns all recorded jobs of a run, or those of one scheduler, oldest first."""
    try:
        lines = retry_files(lambda: safe_read.read(run.path / "jobs.jsonl")).splitlines()
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge):
        return []
    return [found for found in map(_submitted, lines) if found and engine in (None, found.engine)]


def _submitted(line: bytes) -> Submitted | None:
    """Parses a line strictly, as its job is passed to the scheduler's commands; None if it is torn or not valid."""
    found = safe_read.parse_as(_submitted_of, line)
    return found if found and (found.engine != "slurm" or JOB.fullmatch(found.job)) else None


def _is_job(value: object) -> bool:
    return isinstance(value, str) and OTHER_JOB.fullmatch(value) is not None


_submitted_of = maker(Submitted, job=sound(_is_job), time=sound(is_time), replaces=sound(_is_job))
