"""From a run file to a job in the queue: the run folder, the script in it, and a record of what was submitted."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.loading import absolute_task, load
from hpctrain.config.sections import Config, LaunchConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines.jobs import JOB, LOGS, REFUSAL, SCRIPT, Plan, Submitted, note, note_refusal
from hpctrain.launch.engines.slurm import client, profile
from hpctrain.launch.engines.slurm.directives import require_whole_groups
from hpctrain.launch.engines.slurm.render import job_script, portable_script, signal_seconds
from hpctrain.run.events import CheckpointSaved, Train
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import ALIVE
from hpctrain.run.view import RunView
from hpctrain.system.quantities import ranges


def plan(
    config: Config, run: RunDir, elements: Sequence[Config] = (), at_once: int | None = None, chain: int = 1
) -> Plan:
    """Everything that a submission needs, checked; pure but for reading profiles, the run file and old events.

    Args:
        config: as loaded.
        run: its folder.
        elements: the runs of a job array, whose folders below ``run`` have their numbers.
        at_once: elements that may run at the same time.
        chain: jobs that follow each other; more than one does not requeue.

    Raises:
        UserError: a value that Slurm cannot take, elements that ask for different jobs, or ranks that hold parts of a
            layer on several nodes.
    """
    config = settle(config, run)
    if chain > 1:
        slurm = dataclasses.replace(config.launch.slurm, requeue=False)
        config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, slurm=slurm))
    elements = [settle(each, RunDir.of(each.name, each.run_dir)) for each in elements]
    elements.sort(key=number_of)
    every = tuple(elements) or (config,)
    if any(shape_of(each) != shape_of(every[0]) for each in every):
        fix = "sweep launch keys without Slurm, or submit one array for each value"
        raise UserError("the runs of one job array have the same launch settings", fix)
    indices = ",".join(ranges(map(number_of, elements))) + (f"%{at_once}" if at_once else "") if elements else None
    for each in every:
        require_whole_groups(each)
    in_order, run_file = any(each.parallel.tensor > 1 for each in every), run.path if elements else run.run_yaml
    script = job_script(config, run_file, run.logs, own_bin(), signal_s(config, run), indices, in_order)
    return Plan(config, run, script, tuple(elements))


def number_of(element: Config) -> int:
    """Of an element of an array, which its folder has."""
    return int(RunDir.of(element.name, element.run_dir).path.name)


def shape_of(element: Config) -> LaunchConfig:
    """What a job is asked for; the program and its variables are each element's own."""
    return dataclasses.replace(element.launch, command=(), env={})


def settle(config: Config, run: RunDir) -> Config:
    """The configuration that the job reads: profiles applied, paths absolute, so that it means the same anywhere."""
    task = absolute_task(config.task)
    return dataclasses.replace(config, task=task, run_dir=str(run.path), launch=profile.resolve(config.launch))


def portable(config: Config) -> str:
    """A script for any run file with the same resources."""
    launch = profile.resolve(config.launch)
    return portable_script(dataclasses.replace(config, launch=launch), signal_seconds(launch))


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


def submit(
    planned: Plan, options: Sequence[str] = (), chain: int = 1, cwd: str | None = None, always: Sequence[str] = ()
) -> list[str]:
    """Submits a written plan; the job ids. Reports jobs that cannot be noted in the run folder.

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
                    note_refusal(planned.run, error.what)
                raise
            what = f"{error.what}; before that job {', '.join(ids)} was submitted"
            raise RunFailed(what, f"{error.fix}; hpctrain cancel takes back what was submitted") from error
        (planned.run.path / REFUSAL).unlink(missing_ok=True)
        note(planned.run, Submitted(ids[-1], time.time(), cwd, place))
        for config in planned.elements:
            run = RunDir.of(config.name, config.run_dir)
            note(run, Submitted(f"{ids[-1]}_{run.path.name}", time.time(), cwd))
    return ids


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
            raise UserError(f"--after {job}: Slurm does not know this job, and would begin at once", fix)
        if bad := [state for state in states if state not in (*ALIVE, "COMPLETED")]:
            fix = "resume that run first, and name its new job"
            raise UserError(f"--after {job}: that job is {bad[0]}, so this one would never begin", fix)
