"""What the supervisor does in a Slurm job beside watching ranks: stage in, find a launcher that works, requeue."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.config import Config
from hpctrain.errors import NoRequeue, RunFailed, UserError
from hpctrain.launch.slurm import client, preflight, stage
from hpctrain.launch.slurm.job import Job
from hpctrain.launch.slurm.launcher import Launcher, candidates
from hpctrain.launch.slurm.preflight import Expected, Problem
from hpctrain.launch.slurm.probe import scratch_dir
from hpctrain.run_dir import RunDir

POLL_S = 0.05


@dataclass(frozen=True)
class Prepared:
    """How the ranks of this attempt are started."""

    launcher: Launcher
    python: str
    """Interpreter of the ranks: node-local where the environment was staged."""
    task_args: Mapping[str, Any]
    """The task's arguments, with paths of staged copies."""


class StopAsked(Exception):
    """The job was told to stop before its ranks had started."""


def prepare(config: Config, run: RunDir, job: Job, stop_asked: Callable[[], bool]) -> Prepared:
    """Stages in and finds a launcher whose preflight passes.

    Args:
        config: with the site profile applied.
        run: the run folder, which exists.
        job: the allocation.
        stop_asked: polled while waiting.

    Raises:
        StopAsked: there is nothing to save yet.
        UserError: a launcher, MPI type or file that does not exist, ranks that do not find each other.
        NoRequeue: a host that cannot take part; it is named.
    """
    offered = client.mpi_types() if shutil.which("srun") else []
    found = candidates(config.launch, job.nodes, job.ranks, offered, shutil.which("mpirun") is not None)
    python, task_args = stage_in(config, run, job, found[0], stop_asked)
    if not config.launch.preflight:
        return Prepared(found[0], python, task_args)
    failed: list[str] = []
    for launcher in found:
        problems = check(config, run, job, launcher, python, stop_asked)
        for problem in problems:
            print(f"hpctrain: preflight with {launcher.describe()}: {problem.what}", file=sys.stderr, flush=True)
        fatal = next((problem for problem in problems if problem.fatal), None)
        if fatal is None:
            return Prepared(launcher, python, task_args)
        if not fatal.launcher:
            raise NoRequeue(f"preflight: {fatal.what}", fatal.fix)
        failed.append(f"{launcher.describe()}: {fatal.what}")
        last = fatal
    raise UserError(f"preflight: {'; '.join(failed)}", last.fix)


def check(
    config: Config, run: RunDir, job: Job, launcher: Launcher, python: str, stop_asked: Callable[[], bool]
) -> list[Problem]:
    """Problems that the ranks' reports show under one launcher."""
    slurm = config.launch.slurm
    expected = Expected(
        job.nodes, job.ranks, slurm.gpus_per_node or 0, slurm.cpus_per_rank or 1,
        mpi=bool(config.task) and job.ranks > 1,
    )  # fmt: skip
    command = [python, "-m", "hpctrain.launch.slurm.probe", f"--run-dir={run.path}", f"--scratch={slurm.scratch or ''}"]
    command += ["--mpi"] if expected.mpi else []
    output = _run(launcher.words(command, config.launch.env), config, 60 + job.ranks / 20, stop_asked)
    problems = preflight.judge(preflight.reports(output.splitlines()), expected, client.hosts(job.nodelist))
    if any(problem.fatal for problem in problems):
        print(output, file=sys.stderr, flush=True)
    return problems


def stage_in(
    config: Config, run: RunDir, job: Job, launcher: Launcher, stop_asked: Callable[[], bool]
) -> tuple[str, Mapping[str, Any]]:
    """Copies what launch.stage_in names to every node; the ranks' interpreter and the task's arguments."""
    launch = config.launch
    if not launch.stage_in and not launch.stage_environment:
        return sys.executable, config.task_args
    folder = scratch_dir(launch.slurm.scratch or "") / f"hpctrain-{job.id}"
    command = [sys.executable, "-m", "hpctrain.launch.slurm.stage", str(folder), *map(_absolute, launch.stage_in)]
    python = sys.executable
    if launch.stage_environment:
        archive = run.path / "environment.tar"
        stage.pack(Path(sys.prefix), archive)
        command += ["--unpack", str(archive)]
        python = str(folder / "environment" / Path(sys.executable).relative_to(sys.prefix))
    output = _run(launcher.once_a_node(command), config, 3600, stop_asked)
    if "hpctrain: " in output:
        what, _, fix = output.partition("hpctrain: ")[2].strip().partition("\n  fix: ")
        raise NoRequeue(f"stage-in: {what}", fix.split("\n")[0])
    targets = {name: str(stage.target(folder, Path(_absolute(name)))) for name in launch.stage_in}
    return python, stage.staged_values(dict(config.task_args), targets)


def requeue(config: Config, run: RunDir, job: Job, exclude: Sequence[str] = ()) -> None:
    """Has Slurm run the job again; returns at once, Slurm then ends this process.

    Hosts cannot be excluded from a job that runs, so with some to exclude the script is submitted anew.

    Raises:
        UserError: the site's rules or the cap do not allow it.
        RunFailed: Slurm refused.
    """
    slurm = config.launch.slurm
    if slurm.requeue is False:
        raise UserError("launch.slurm.requeue is false", "submit the run again, or use hpctrain submit --chain")
    attempts = len(run.attempts())
    if attempts > slurm.max_requeues:
        raise NoRequeue(f"{attempts} attempts used up launch.slurm.max_requeues {slurm.max_requeues}", "raise it and resume")
    if exclude:
        from hpctrain.launch.slurm.submission import Submitted, record

        hosts = ",".join([*slurm.exclude, *exclude])
        number = client.submit(run.path / "job.sbatch", [f"--exclude={hosts}", f"--chdir={os.getcwd()}"])
        record(run, Submitted(number, time.time(), os.getcwd()))
        return
    client.requeue(job.id)


def end_chain(run: RunDir, job: Job) -> None:
    """Takes the jobs that were to follow out of the queue: there is nothing left to do, or it would fail again."""
    from hpctrain.launch.slurm.submission import submissions

    jobs = [each.job for each in submissions(run)]
    later = jobs[jobs.index(job.id) + 1 :] if job.id in jobs else []
    if later:
        client.cancel(later, pending_only=True)


def _run(words: Sequence[str], config: Config, timeout_s: float, stop_asked: Callable[[], bool]) -> str:
    """Output of a helper on the nodes; what hangs is ended, and its output until then returned."""
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **config.launch.env}
        )
        try:
            while process.poll() is None:
                if stop_asked():
                    raise StopAsked
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        finally:
            _end(process)
        output.seek(0)
        return output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.wait()
            raise RunFailed("the launcher did not end when it was told to", "look at the job's log") from error


def _absolute(name: str) -> str:
    return str(Path(name).absolute())
