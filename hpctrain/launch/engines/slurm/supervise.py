"""``hpctrain supervise`` inside a Slurm job: runs attempts, then requeues the job or ends it by the last verdict."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence

from hpctrain.config.loading import dump, load
from hpctrain.config.sections import Config
from hpctrain.errors import Code, ExitCode, HpctrainError, NoRequeue, RunFailed, UserError
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.engines.jobs import Submitted, record, submissions
from hpctrain.launch.engines.local import plain_command, rank_environment
from hpctrain.launch.engines.slurm import allocation, client, leave_out, requeue
from hpctrain.launch.engines.slurm.directives import ranks_per_node
from hpctrain.launch.engines.slurm.job import Job, Who, current, who_ends
from hpctrain.launch.engines.slurm.submission import settle, signal_s
from hpctrain.launch.engines.slurm.time_limit import TimeLimit, start_s
from hpctrain.launch.outage_retry import Stopped
from hpctrain.launch.supervisor import report, supervise
from hpctrain.run import live_lock
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR, STAGED
from hpctrain.run.run_status import ALIVE
from hpctrain.run.stop_request import StopRequest, requested_stop
from hpctrain.run.verdict import Action, RunVerdict
from hpctrain.system import python
from hpctrain.system.cgroups import threads_per_rank
from hpctrain.system.output import say
from hpctrain.system.retry import retry_or_fail
from hpctrain.system.signals import StopSignals

PAST_QUESTION = {Who.REQUEUE: "Slurm put the job back into the queue", Who.PREEMPTION: "preempted"}
"""Ways in which Slurm ends a job that do not end the run, however its ranks ended; with the reason to report."""

SIGNAL_S = "HPCTRAIN_SIGNAL_S"
"""Environment variable set by the job script: how many seconds early Slurm sends its stop signal."""
LEAVE_S = 60.0
"""Seconds to wait for Slurm to end this process after a requeue."""
LOOK_S = 0.2


def supervise_job(run_file: str, overrides: Sequence[str] = (), verbose: bool = False) -> int:
    """Supervises a run in the current Slurm job; returns the job's exit code.

    Raises:
        UserError: this is not a Slurm job, the run file is not valid, or the run folder is in use.
    """
    job, parent = current(), os.getppid()
    if job is None:
        raise UserError("this is not a Slurm job", "submit the run with hpctrain submit; hpctrain run needs no Slurm")
    client.forget_srun_options()
    signals = StopSignals()  # until this process ends, as Slurm's must not interrupt what follows the ranks' end either
    signals.install()
    config = retry_or_fail(lambda: load(run_file, overrides))
    try:
        return attempt(config, RunDir.of(config.name, config.run_dir), job, parent, verbose, signals.received)
    except HpctrainError as error:  # also put it into the job's comment, as the log may be on a full disk
        comment(job, f"{error.what}; fix: {error.fix}", config)
        raise
    finally:
        signals.restore()


def attempt(config: Config, run_dir: RunDir, job: Job, parent: int, verbose: bool, received: list[int]) -> int:
    """See ``supervise_job``.

    Args:
        config: configuration as loaded.
        run_dir: the run folder.
        job: the job.
        parent: process ID of Slurm's daemon for the batch script.
        verbose: show the launcher's messages.
        received: stop signals received so far, and from now on.
    """
    config = settle(as_allocated(config, job), run_dir)
    forget_dead_holder(run_dir)
    limit = TimeLimit(job.id, lead_s(config, run_dir), start_s(run_dir))
    place = allocation.JobNodes.of(config, run_dir, job)

    def launch(number: int) -> Launch:
        limit.require_room()
        made = make_launch(config, run_dir, place, number, verbose)
        place.watch_supervisor()
        return made

    verdict = supervise(
        run_dir,
        launch,
        limits(config, limit, requeue.line_of(submissions(run_dir, "slurm"), job.id)),
        place.facts,
        run_yaml=dump(config),
        verbose=verbose,
        by_person=lambda number: by_person(number, job),
        again=lambda verdict: place.facts if limit.has_room() and place.serves(verdict) else None,
        received=received,
    )
    if verdict.code is Code.IN_USE:  # the run, and this job's next start, now belong to the newer attempt
        report(verdict, run_dir)
        return verdict.exit_code
    who = who_ends(client.job_fields(job.id), job.restarts) if verdict.action is not Action.DONE else Who.NOBODY
    final = in_view_of(who, verdict, asked=requested_stop(run_dir))
    if final is not verdict:
        amend(run_dir, job, final)
    publish(final, config, run_dir, job)
    try:
        leave_out.note_culprit(config, run_dir)
    except (HpctrainError, OSError) as error:
        say(f"no node is excluded: {error}")
    if who is Who.REQUEUE and final.action is Action.REQUEUE:
        await_end(parent, received)
        return final.exit_code
    if who is Who.REQUEUE:  # the run must not continue, but Slurm has put its job back into the queue
        requeue.take_out([job.id])
    return follow(final, config, run_dir, job, parent, received)


def by_person(number: int, job: Job) -> bool:
    """Whether a signal means that the run must stay stopped.

    SIGUSR1, which the job script requests, never does. SIGTERM comes from scancel, but also when Slurm needs the nodes.
    """
    if number == signal.SIGUSR1:
        return False
    return who_ends(client.job_fields(job.id), job.restarts) in (Who.PERSON, Who.NOBODY)


def in_view_of(who: Who, verdict: RunVerdict, asked: StopRequest | None) -> RunVerdict:
    """Returns the verdict, corrected for who is ending the job; pure.

    Args:
        who: who is ending the job.
        verdict: the verdict from the ranks' last words.
        asked: the stop request in the STOP file, if there is one.
    """
    person = asked if asked is not None and asked.signal is None else None
    if person and verdict.action is Action.REQUEUE:  # a person asked while the ranks were stopping for another reason
        reason = f"{verdict.reason}; {person.by} had asked it to stop"
        return dataclasses.replace(verdict, action=Action.STOP, reason=reason)
    # A failure before the ranks started may be Slurm's doing, so it is not final.
    final = verdict.action in (Action.DONE, Action.FAIL) and not verdict.before_ranks
    if person or final or who not in PAST_QUESTION:
        return verdict
    # Not a failure of the run: Slurm ended the ranks.
    what = f"{PAST_QUESTION[who]} ({verdict.reason})"
    fix = "nothing to do: it resumes from the last checkpoint"
    # Keep the code: ranks that did not end in order may have left something on their nodes (allocation.unclean).
    host = verdict.host if verdict.code is Code.NODE else None
    return dataclasses.replace(
        verdict, action=Action.REQUEUE, exit_code=ExitCode.STOPPED, reason=what, fix=fix, rank=None, host=host
    )


def as_allocated(config: Config, job: Job) -> Config:
    """Returns the configuration for the allocated nodes; a portable script's job may differ from the run file."""
    spare = min(config.launch.spare_nodes, job.nodes - 1)
    ranks = max(1, job.ranks // job.nodes)
    launch = dataclasses.replace(config.launch, nodes=job.nodes - spare, spare_nodes=spare, ranks_per_node=ranks)
    return dataclasses.replace(config, launch=launch)


def lead_s(config: Config, run_dir: RunDir) -> float:
    """Returns the seconds before the time limit at which the job script has Slurm signal."""
    return float(os.environ.get(SIGNAL_S) or signal_s(config, run_dir))


def limits(config: Config, limit: TimeLimit, jobs: Sequence[str] = ()) -> Limits:
    """Returns the limits for attempts; to stop, ranks get at least 90% of the time between signal and time limit."""
    grace_s = max(config.launch.stop_grace_s, 0.9 * limit.signal_s)
    return Limits(grace_s, config.launch.failures_allowed(in_job=True), limit.left_s, limit.due, jobs)


def make_launch(config: Config, run_dir: RunDir, place: allocation.JobNodes, number: int, verbose: bool) -> Launch:
    """Returns what starts the ranks of an attempt on their nodes.

    Raises:
        HpctrainError: the ranks cannot be started; see ``allocation.prepare``.
    """
    job = place.job
    if job.id not in [each.job for each in submissions(run_dir, "slurm")]:  # submitted with sbatch directly
        try:
            record(run_dir, Submitted(job.id, time.time(), os.getcwd()))
        except HpctrainError as error:
            say(f"hpctrain status and stop do not know of this job: {error}")
    prepared = place.prepare()
    if config.task:
        words = ["train", str(run_dir.run_yaml), *["--verbose"] * verbose]
        command = [*config.launch.slurm.wrap, *python.module("hpctrain", *words, interpreter=prepared.python)]
    else:
        command = [*plain_command(), *config.launch.slurm.wrap, *config.launch.command]
    given = config.train.threads or config.launch.slurm.cpus_per_rank
    cores = int(os.environ.get("SLURM_CPUS_ON_NODE") or 1)
    threads = given or threads_per_rank(cores, ranks_per_node(config.launch))
    env = rank_environment(config, job.ranks, threads, verbose, os.environ)
    env |= prepared.launcher.environment({**os.environ, **env})
    env |= {STAGED: json.dumps(prepared.copies)} if prepared.copies else {}
    say(f"attempt {number}: {job.ranks} ranks on {job.nodelist} with {prepared.launcher.describe()}")
    # mpirun exports only named variables; the supervisor sets the last two.
    named = {**env, ATTEMPT: "", RUN_DIR: ""}
    return Launch(
        prepared.launcher.words(command, named),
        env,
        job.ranks,
        saves=bool(config.task),
        hosts=prepared.hosts,
        unheard=lambda text: bool(client.unheard(text)),
        unreached=client.unreached,
        can_lose=place.can_lose,
    )


def follow(
    verdict: RunVerdict, config: Config, run_dir: RunDir, job: Job, parent: int, received: Sequence[int] = ()
) -> int:
    """Requeues the job if the verdict says so and the site allows it, else ends its chain; returns the exit code."""
    if verdict.action is not Action.REQUEUE:
        requeue.end_chain(run_dir, job)
        return verdict.exit_code
    try:
        restarts = requeue.requeue(config, run_dir, job)
    except (NoRequeue, requeue.Cancelled, Stopped, RunFailed) as error:
        is_refused = isinstance(error, RunFailed)
        failed = is_refused and verdict.exit_code is not ExitCode.STOPPED  # nothing else restarts the run
        action = Action.FAIL if failed else Action.STOP
        code = verdict.exit_code
        if isinstance(error, NoRequeue):
            action, code = Action.DO_NOT_REQUEUE, error.exit_code
        why, fix = (f"not requeued: {error.what}", requeue.BY_HAND) if is_refused else (error.what, error.fix)
        final = dataclasses.replace(verdict, action=action, exit_code=code, reason=f"{verdict.reason}; {why}", fix=fix)
        amend(run_dir, job, final)
        publish(final, config, run_dir, job)
        if not is_refused:
            requeue.end_chain(run_dir, job)
        return final.exit_code
    except HpctrainError as error:
        say(f"not requeued: {error}")
        return verdict.exit_code
    say("requeued" if restarts else "submitted again, as a new job")
    if restarts:
        await_end(parent, received)
    return verdict.exit_code


def publish(verdict: RunVerdict, config: Config, run_dir: RunDir, job: Job) -> None:
    """Prints a verdict; also puts it into the job's comment if it could not be printed or stored in the run folder."""
    said = report(verdict, run_dir)
    stored = of_job(run_dir, job).verdict
    if not said or stored != verdict:
        comment(job, f"{verdict.reason}; fix: {verdict.fix}" if verdict.fix else verdict.reason, config)


def comment(job: Job, text: str, config: Config) -> None:
    """Appends a text to the job's comment, after the user's own; if Slurm refuses, only reports that."""
    given = f"{config.launch.slurm.comment}; " if config.launch.slurm.comment else ""
    try:
        client.comment(job.id, f"{given}hpctrain: {text}")
    except HpctrainError as error:
        say(f"the job's comment cannot be set: {error.what}")


def of_job(run_dir: RunDir, job: Job) -> Attempt:
    """Returns this job's newest attempt; one without a number if the run folder has none."""
    try:
        attempts = Attempts(run_dir).all()
    except (HpctrainError, OSError):
        attempts = []
    mine = (each for each in reversed(attempts) if (each.job, each.restarts) == (job.id, job.restarts))
    return next(mine, Attempt())


def await_end(parent: int, received: Sequence[int] = ()) -> None:
    """Waits for Slurm to end this process after a requeue: if it exited first, the job would count as ended.

    Args:
        parent: Slurm's daemon for the batch script; if it has died, nothing will end this process.
        received: signals received so far, and from now on; with SIGTERM, Slurm ends the job.
    """
    end = time.monotonic() + LEAVE_S
    while signal.SIGTERM not in received and os.getppid() == parent and time.monotonic() < end:
        time.sleep(LOOK_S)


def amend(run_dir: RunDir, job: Job, verdict: RunVerdict) -> None:
    """Replaces the stored verdict on this job's attempt; if that fails, only reports it."""
    try:
        if number := of_job(run_dir, job).number:
            Attempts(run_dir).amend(number, verdict)
    except (HpctrainError, OSError) as error:
        say(str(error))


def forget_dead_holder(run_dir: RunDir) -> None:
    """Releases the run's lock if Slurm says that its holder's job is over, without waiting until it is stale.

    A job that the answer lacks may be another user's, which sites hide.
    """
    holder = live_lock.read(run_dir.lock_file)
    here = holder is not None and holder.cluster == os.environ.get("SLURM_CLUSTER_NAME")
    if holder is None or not here or holder.job is None or holder.job == os.environ.get("SLURM_JOB_ID"):
        return
    try:
        states = [entry.state for entry in client.queue([holder.job])]
        if states and not set(states) & {*ALIVE}:
            live_lock.LiveLock(run_dir, holder).release()
    except HpctrainError as error:
        say(str(error))
