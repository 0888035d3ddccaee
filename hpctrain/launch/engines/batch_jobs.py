"""The batch systems in ``batch_systems`` as schedulers; see ``launch.engines.scheduler``."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from hpctrain.config.loading import absolute_task
from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines.batch_systems import SYSTEMS, BatchSystem
from hpctrain.launch.engines.jobs import LOGS, Plan, SubmitOptions
from hpctrain.launch.engines.scheduler import Scheduler, ask, end_each, submit_one
from hpctrain.launch.engines.slurm.directives import printable
from hpctrain.launch.engines.slurm.render import templates
from hpctrain.launch.engines.slurm.submission import own_bin
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import JOB
from hpctrain.run.run_status import UNKNOWN, QueueEntry

STATES = {
    **dict.fromkeys(("qw", "hqw", "Rq", "Rwq", "hRwq", "Eqw", "Q", "H", "W", "T"), "PENDING"),
    **dict.fromkeys(("PEND", "PSUSP", "DEPEND", "PRIORITY", "SCHED"), "PENDING"),
    **dict.fromkeys(("r", "t", "Rr", "Rt", "hr", "R", "B", "RUN"), "RUNNING"),
    **dict.fromkeys(("s", "S", "USUSP", "SSUSP"), "SUSPENDED"),
    **dict.fromkeys(("dr", "dt", "dRr", "E", "CLEANUP"), "COMPLETING"),
    "DONE": "COMPLETED",
    "EXIT": "FAILED",
}
"""Slurm's word for each batch system's job state. Only LSF's queue shows how jobs ended."""


class BatchJobs(Scheduler):
    """A batch system."""

    ends_gently = True

    def __init__(self, name: str, system: BatchSystem) -> None:
        self.name = name
        self.title = system.title
        self.system = system

    def plan(self, config: Config, run: RunDir, options: SubmitOptions) -> Plan:
        """Returns a plan with a job script."""
        options.refuse(self.title)
        config = dataclasses.replace(config, task=absolute_task(config.task), run_dir=str(run.path))
        return Plan(config, run, script(self.system, config, run), name="job.sh")

    def command(self, planned: Plan) -> Sequence[str]:
        """Returns the submit command, which reads the script from standard input."""
        return [*self.system.submit, "<", str(planned.script_file)]

    def submit(self, planned: Plan) -> tuple[list[str], Sequence[str]]:
        """Submits the script from the current folder."""

        def send() -> str:
            said = ask(self.system.submit, given=planned.script)
            last_line = said.strip().rpartition("\n")[2]
            found = re.match(r"(?:Job <)?(\w[\w.\[\]-]*)", last_line)
            if found is None:
                raise RunFailed(f"{self.system.submit[0]} names no job: {said[-300:]}", "see its queue")
            return found[1]

        return submit_one(self, planned, send, own_job=os.environ.get(JOB))

    def states(self, jobs: Sequence[Sequence[str]], timeout_s: float, ended: bool) -> Mapping[str, QueueEntry]:
        """Queries the newest job of each run, one command per run."""
        found: dict[str, QueueEntry] = {}
        for of_run in filter(None, jobs):
            job = of_run[-1]
            if word := state(self.system, job, timeout_s):
                found[job] = QueueEntry(job, word)
        return found

    def end(self, jobs: Sequence[tuple[RunDir, Sequence[str]]]) -> tuple[list[str], list[str]]:
        """Ends jobs that are the run's: their details contain the path of its log."""

        def is_of(run: RunDir, job: str) -> bool:
            details = "".join(ask(filled(self.system.details, job)).split())  # long lines are wrapped
            return "".join(str(run.path / LOGS).split()) in details

        return end_each(jobs, is_of, lambda job: ask(filled(self.system.cancel, job)))


def script(system: BatchSystem, config: Config, run: RunDir) -> str:
    """Returns the text of a job script; pure.

    Raises:
        UserError: a value that a script cannot hold.
    """
    launch = config.launch
    nodes = launch.nodes + launch.spare_nodes
    ranks = launch.ranks_per_node or 1
    log = printable(str(run.logs / "job.out"), "run_dir")
    if not re.fullmatch(r"[\w/.+@-]+", log):
        raise UserError(f"the run folder is {run.path}", "use a path of letters, digits and /._+@- for batch systems")
    size = {"nodes": nodes, "ranks": ranks, "total": nodes * ranks, "cores": ranks * (config.train.threads or 1)}
    directives = [each.format(name=config.name, log=log, **size) for each in system.directives]
    directives += [printable(each, "launch.directives") for each in launch.directives]
    return (
        templates()
        .get_template("batch.sh.j2")
        .render(
            origin=f"Run {config.name}, written by hpctrain: to change it, change the run file and render it again.",
            directives=directives,
            prefix=system.prefix,
            launch=launch,
            again=system.again.format(folder=shlex.quote(str(run.path))),
            bin=str(own_bin()),
            job=system.job,
            run_file=str(run.run_yaml),
        )
    )


def state(system: BatchSystem, job: str, timeout_s: float) -> str:
    """Returns a job's state in Slurm's words; empty if it is not in the queue. Raises RunFailed on a timeout."""
    try:
        lines = ask(filled(system.queue, job), timeout_s=timeout_s).splitlines()
    except RunFailed as error:
        if isinstance(error.__cause__, subprocess.TimeoutExpired):
            raise
        return ""  # some batch systems exit with an error for a job that they do not know
    number = job.partition(".")[0]  # PBS truncates the server's name
    for words in map(str.split, lines):
        if len(words) > system.column and words[0].partition(".")[0] == number:
            return STATES.get(words[system.column], UNKNOWN)
    return ""


def filled(words: Sequence[str], job: str) -> list[str]:
    """Fills a job's number into a command."""
    return [word.format(job=job) for word in words]


BATCH = {name: BatchJobs(name, system) for name, system in SYSTEMS.items()}
