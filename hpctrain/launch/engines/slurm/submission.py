"""Slurm as a scheduler: plans the run folder and its script, submits jobs, and tells a run's jobs from others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hpctrain.config.loading import absolute_task, load
from hpctrain.config.sections import Config, LaunchConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines.jobs import (
    JOB,
    LOGS,
    NO_OPTIONS,
    REFUSAL,
    SCRIPT,
    Plan,
    SubmitOptions,
    Submitted,
    note,
    note_refusal,
    submissions,
    write,
)
from hpctrain.launch.engines.scheduler import Scheduler, to_submit
from hpctrain.launch.engines.slurm import client, leave_out, profile
from hpctrain.launch.engines.slurm.directives import ranks_per_node, require_whole_groups
from hpctrain.launch.engines.slurm.render import job_script, portable_script, signal_seconds
from hpctrain.launch.nested_launcher import refuse_launcher
from hpctrain.run.event_log import events_if_readable
from hpctrain.run.events import CheckpointSaved, Train
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import ALIVE, QueueEntry
from hpctrain.system.output import say
from hpctrain.system.quantities import ranges

UNKNOWN_NODE = "Invalid node name"
"""Part of sbatch's message if a node to exclude is not of this cluster, or not any more."""


class Slurm(Scheduler):
    """Slurm."""

    name = "slurm"
    title = "Slurm"
    ends_gently = False

    def plan(self, config: Config, run: RunDir, options: SubmitOptions) -> Plan:
        """Returns a plan with an sbatch script."""
        if ignored := [name for name in os.environ if name.startswith("SBATCH_") and name not in profile.OF_SITE]:
            say(f"{', '.join(ignored)}: ignored, set launch.slurm instead")
        if options.portable:
            return Plan(config, run, portable(config), options=options)
        return plan(config, run, options)

    def command(self, planned: Plan) -> Sequence[str]:
        """Returns the sbatch command."""
        without = leave_out.option(planned.config, planned.run)
        return ["sbatch", *without, *after(planned.options), str(planned.script_file)]

    def submit(self, planned: Plan) -> tuple[list[str], Sequence[str]]:
        """Submits with sbatch."""
        client.find("sbatch")
        if planned.options.after:
            check_after(planned.options.after)
        without = leave_out.option(planned.config, planned.run)
        with to_submit(self, planned.run):
            undo = write(planned)
            past = submissions(planned.run, self.name) if planned.options.resumes else []
            ids = submit(planned, past[-1].cwd if past else None, without, undo)
        return ids, [f"{without[0]} (hpctrain nodes shows why)"] if without else []

    def states(self, jobs: Sequence[Sequence[str]], timeout_s: float, ended: bool) -> Mapping[str, QueueEntry]:
        """Queries the queue once for all jobs, and with ``ended`` accounting for those that the queue has forgotten."""
        if not ended:
            return {entry.id: entry for entry in client.queue([job for each in jobs for job in each], timeout_s)}
        arrays = dict.fromkeys(job.partition("_")[0] for each in jobs for job in each)  # one word for many elements
        found = {entry.id: entry for entry in client.queue(list(arrays), timeout_s)}
        forgotten = [each[-1] for each in jobs if each and not any(job in found for job in each)]
        return found | {entry.id: entry for entry in client.accounted(forgotten, timeout_s)}

    def unrecorded(self, runs: Sequence[RunDir], timeout_s: float = client.TIMEOUT_S) -> Sequence[Sequence[str]]:
        """See ``unrecorded``."""
        with contextlib.suppress(client.Unconfigured):
            if shutil.which("squeue"):
                return unrecorded(runs, timeout_s)
        return super().unrecorded(runs)

    def end(self, jobs: Sequence[tuple[RunDir, Sequence[str]]]) -> tuple[list[str], list[str]]:
        """Ends jobs with scancel."""
        client.find("scancel")
        ids, left = [], []
        for run, given in jobs:
            own, others = apart(run, given)
            ids += own
            left += others
        if ids:
            client.cancel(ids)
        return ids, left


SLURM = Slurm()


def after(options: SubmitOptions) -> list[str]:
    """Returns sbatch's options for the jobs that must end first."""
    return [f"--dependency=afterok:{':'.join(options.after)}", "--kill-on-invalid-dep=yes"] if options.after else []


def plan(config: Config, run: RunDir, options: SubmitOptions = NO_OPTIONS) -> Plan:
    """Returns a checked plan for a submission. Writes nothing; reads only profiles, the run file and old events.

    Args:
        config: configuration as loaded.
        run: its run folder.
        options: what the command asks for; jobs of a chain are not requeued.

    Raises:
        UserError: a value that Slurm does not accept, elements with different resources, or tensor groups that extend
            over several nodes.
    """
    slurm = config.launch.slurm
    requeue = False if options.chain > 1 else slurm.requeue
    slurm = dataclasses.replace(slurm, exclude=(*slurm.exclude, *options.exclude), requeue=requeue)
    config = settle(dataclasses.replace(config, launch=dataclasses.replace(config.launch, slurm=slurm)), run)
    elements = [settle(each, RunDir.of(each.name, each.run_dir)) for each in options.elements]
    elements.sort(key=number_of)
    every = tuple(elements) or (config,)
    if any(shape_of(each) != shape_of(every[0]) for each in every):
        fix = "sweep launch keys without Slurm, or submit one array for each value"
        raise UserError("the runs of one job array have the same launch settings", fix)
    at_once = f"%{options.at_once}" if options.at_once else ""
    indices = ",".join(ranges(map(number_of, elements))) + at_once if elements else None
    for each in every:
        require_whole_groups(each)
        refuse_launcher(each.launch.command, each.launch.nodes * ranks_per_node(each.launch))
    in_order = any(each.parallel.tensor > 1 for each in every)
    run_file = run.path if elements else run.run_yaml
    script = job_script(config, run_file, run.logs, own_bin(), signal_s(config, run), indices, in_order)
    return Plan(config, run, script, tuple(elements), options=options)


def number_of(element: Config) -> int:
    """Returns the number of an array element, which is the name of its folder."""
    return int(RunDir.of(element.name, element.run_dir).path.name)


def shape_of(element: Config) -> LaunchConfig:
    """Returns the launch settings that elements of an array must share: all but the command and its variables."""
    return dataclasses.replace(element.launch, command=(), env={})


def settle(config: Config, run: RunDir) -> Config:
    """Returns the configuration for the job, valid anywhere: profiles are applied, and paths are absolute."""
    task = absolute_task(config.task)
    return dataclasses.replace(config, task=task, run_dir=str(run.path), launch=profile.resolve(config.launch))


def portable(config: Config) -> str:
    """Returns a script for any run file that needs the same resources."""
    launch = profile.resolve(config.launch)
    return portable_script(dataclasses.replace(config, launch=launch), signal_seconds(launch))


def signal_s(config: Config, run: RunDir) -> int:
    """Returns ``signal_seconds`` with the longest step and save that this run's earlier attempts measured."""
    events = events_if_readable(run)
    steps = [sum(event.seconds_per_step().values()) for event in events if isinstance(event, Train) and event.steps]
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    saves = [(event.stall_s or 0.0) + (event.write_s or 0.0) for event in saved]
    return signal_seconds(config.launch, max(steps, default=None), max(saves, default=None))


def own_bin() -> Path:
    """Returns the folder of this Python environment's programs."""
    return Path(sys.executable).parent.absolute()


def submit(
    planned: Plan, cwd: str | None = None, always: Sequence[str] = (), undo: Callable[[], object] = tuple
) -> list[str]:
    """Submits a written plan; returns the job IDs. Warns about jobs that cannot be recorded in the run folder.

    Args:
        planned: a plan that ``write`` has written to the run folder. Each job of a chain resumes where the last one
            stopped.
        cwd: folder in which the jobs start; by default the current one.
        always: further options of sbatch, for every job of a chain.
        undo: puts back the run's earlier files if Slurm takes no job.

    Raises:
        RunFailed: Slurm refused. If the first jobs of a chain are already in the queue, the message names them.
    """
    cwd = cwd or os.getcwd()
    ids: list[str] = []
    for place in range(planned.options.chain):
        waits = [f"--dependency=afterany:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else after(planned.options)
        try:
            try:
                ids.append(send(planned.run, [f"--chdir={cwd}", *always, *waits]))
            except RunFailed as error:
                if not (always and UNKNOWN_NODE in error.what):
                    raise
                say(f"the job is submitted without {always[0]}: {error.what}")  # it may be of another cluster
                always = ()
                ids.append(send(planned.run, [f"--chdir={cwd}", *waits]))
        except RunFailed as error:
            if not ids:
                if not isinstance(error, client.Unanswered):
                    note_refusal(planned.run, error, undo)
                raise
            what = f"{error.what}; before that job {', '.join(ids)} was submitted"
            raise RunFailed(what, f"{error.fix}; hpctrain cancel cancels what was submitted") from error
        (planned.run.path / REFUSAL).unlink(missing_ok=True)
        note(planned.run, Submitted(ids[-1], time.time(), cwd, place))
        for config in planned.elements:
            run = RunDir.of(config.name, config.run_dir)
            note(run, Submitted(f"{ids[-1]}_{run.path.name}", time.time(), cwd))
    return ids


def send(run: RunDir, options: Sequence[str]) -> str:
    """Submits the run's script and returns the job. If sbatch answers too late, looks for the job in the queue.

    Raises:
        RunFailed: Slurm refused, or did not answer and shows no such job.
    """
    try:
        return client.submit(run.path / SCRIPT, options)
    except client.Unanswered:
        with contextlib.suppress(RunFailed):
            if found := unrecorded([run])[0]:
                return found[-1].partition("_")[0]
        raise


def unrecorded(runs: Sequence[RunDir], timeout_s: float = client.TIMEOUT_S) -> list[list[str]]:
    """Returns for each run its live jobs that jobs.jsonl does not hold, by their script.

    sbatch answered too late, the script was submitted by hand, or the run folder was deleted.
    """
    scripts = {job: Path(command) for job, (state, command) in client.own_scripts(timeout_s).items() if state in ALIVE}
    same = functools.cache(_same)  # all elements of an array have one script

    def of(run: RunDir) -> list[str]:
        known = {each.job for each in submissions(run)}
        others = {job: script for job, script in scripts.items() if known.isdisjoint((job, job.partition("_")[0]))}
        return [job for job, script in others.items() if has_script(run, job, script, same)]

    return list(map(of, runs))


def has_script(run: RunDir, job: str, script: Path, same: Callable[[Path, Path], bool]) -> bool:
    """Whether a job's script is the run's; that of an array is in the folder above its elements."""
    folders = [run.path, *([run.path.parent] if is_element(run, job) else [])]
    return script.name == SCRIPT and any(same(script.parent, folder) for folder in folders)


def apart(run: RunDir, ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the jobs that belong to the run, and a sentence about each of the others, which must not be ended.

    Does not trust jobs.jsonl, since anyone with write access to the run folder may have written it: according to Slurm,
    the job must have this folder's script, a log in it, or a run file that names it.
    """
    own, others = [], []
    for job in ids:
        origin = client.origin(job.partition("_")[0])
        if origin is not None and is_of(run, job, origin):
            own.append(job)
        elif origin is not None:
            described = f"{origin.name!r} of {origin.folder}, and not known to be of {run.path}"
            others.append(f"job {job} is left alone: it is {described} (scancel {job} ends it anyway)")
    return own, others


def is_element(run: RunDir, job: str) -> bool:
    """Whether a job is the array element that trains in this folder."""
    return run.path.name.isdigit() and job.endswith(f"_{run.path.name}")


def is_of(run: RunDir, job: str, origin: client.Origin) -> bool:
    """Whether a job was submitted for a run folder. Does not follow links inside the folder."""
    folders = [run.path]
    if is_element(run, job):  # an array's logs are in the folder above its elements
        folders.append(run.path.parent)
    if has_script(run, job, Path(origin.command), _same):
        return True
    log = Path(origin.output)
    if log.parent.name == LOGS and any(_same(log.parent.parent, folder) for folder in folders):
        return True
    words = origin.command.split(" ")  # paths may contain blanks
    files = [Path(origin.folder, " ".join(words[begin:])) for begin in range(1, len(words))]
    return any(_same(_run_folder(file, origin.folder), run.path) for file in files if file.is_file())


def _run_folder(run_file: Path, cwd: str) -> Path | None:
    """Returns the folder that a run file names, for a process started in ``cwd``; None if it cannot be loaded."""
    try:
        config = load(run_file)
    except UserError:
        return None
    return Path(cwd, Path(config.run_dir or Path("runs") / config.name).expanduser())


def _same(one: Path | None, other: Path) -> bool:
    try:
        return one is not None and (one == other or one.samefile(other))
    except OSError:
        return False


def entries_of(job: str, entries: Iterable[QueueEntry]) -> list[QueueEntry]:
    """Returns a job's entries, or those of an array's elements."""
    return [entry for entry in entries if job in (entry.id, entry.id.partition("_")[0])]


def check_after(jobs: Sequence[str]) -> None:
    """Checks the jobs of ``--after``. Slurm takes an unknown dependency as fulfilled and would start at once.

    Raises:
        UserError: a job is unknown to Slurm, or has failed.
        RunFailed: Slurm does not answer.
    """
    if wrong := [job for job in jobs if not JOB.fullmatch(job)]:
        fix = "give numbers of jobs, as hpctrain submit --parsable prints them"
        raise UserError(f"--after {wrong[0]} is not a job", fix)
    queued = client.queue(jobs)
    ended = client.accounted([job for job in jobs if not entries_of(job, queued)])
    for job in jobs:
        states = [entry.state for entry in entries_of(job, queued) or entries_of(job, ended)]
        if not states:
            fix = "correct the number; if that job succeeded long ago, leave --after out"
            raise UserError(f"--after {job}: Slurm does not know this job, and would start this one at once", fix)
        if bad := [state for state in states if state not in (*ALIVE, "COMPLETED")]:
            fix = "resume that run first, and name its new job"
            raise UserError(f"--after {job}: that job is {bad[0]}, so this one would never start", fix)
