"""The schedulers by name. Commands get a run's scheduler here and do not depend on any particular one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hpctrain.config.sections import Config, LaunchConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines import scheduler
from hpctrain.launch.engines.batch_jobs import BATCH
from hpctrain.launch.engines.jobs import submissions
from hpctrain.launch.engines.slurm.submission import SLURM
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import QueueEntry

SCHEDULERS: Mapping[str, scheduler.Scheduler] = {"slurm": SLURM, **BATCH}


def of(config: Config) -> scheduler.Scheduler:
    """Returns the scheduler that a run file names, by default Slurm. Raises UserError if its engine has no queue."""
    engine = config.launch.engine or "slurm"
    if engine not in SCHEDULERS:
        what = f"launch.engine is {engine}, which has no queue to submit to"
        raise UserError(what, "start it with hpctrain run, or name another engine")
    return SCHEDULERS[engine]


def of_run(run: RunDir) -> scheduler.Scheduler:
    """Returns the scheduler of the run's newest job."""
    return SCHEDULERS[engine_of(run)]


def engine_of(run: RunDir) -> str:
    """Returns the name of the scheduler of the run's newest job; by default Slurm."""
    named = [each.engine for each in submissions(run) if each.engine in SCHEDULERS]
    return named[-1] if named else "slurm"


def as_submitted(config: Config, run: RunDir) -> Config:
    """Returns a folder's run file as for submission: for the scheduler of its newest job, without that job's hosts."""
    if (engine := engine_of(run)) == "slurm":
        return config
    shell = LaunchConfig.remote_shell
    launch = dataclasses.replace(config.launch, engine=engine, hosts=(), remote_shell=shell)  # type: ignore[arg-type]
    return dataclasses.replace(config, launch=launch)


def alive(runs: Sequence[RunDir]) -> list[list[QueueEntry]]:
    """Returns for each of these runs, which have one scheduler, its jobs that are waiting or running."""
    return scheduler.alive(of_run(runs[0]), runs) if runs else []


def goes_on(run: RunDir) -> bool:
    """Whether a job of the run is waiting or running. True if the scheduler does not answer: callers poll again."""
    try:
        return bool(scheduler.alive(of_run(run), [run], recorded_only=True)[0])
    except RunFailed:
        return True
