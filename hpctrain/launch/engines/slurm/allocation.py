"""What the supervisor does in a Slurm job before the ranks start: stage in, find a launcher that works.

Staging has every node copy what the run file names to its own disk, by ``stage_on_node``, and waits for all. What was
prepared for the first attempt in a job holds for all, which its ``Place`` sees to.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.config.sections import Config
from hpctrain.errors import Code, ExitCode, HpctrainError, NoRequeue, UserError
from hpctrain.launch.engines.slurm import client, leave_out, preflight, stage_on_node
from hpctrain.launch.engines.slurm.job import Job, Who, who_ends
from hpctrain.launch.engines.slurm.launcher import Launcher, Srun, candidates, empty_step, once_a_node
from hpctrain.launch.engines.slurm.probe import scratch_dir
from hpctrain.launch.mpi_library import MpiRun, find_mpirun, probe
from hpctrain.launch.postmortem import last_line
from hpctrain.launch.supervisor import choose
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.verdict import ORDERLY_CODES, RunVerdict
from hpctrain.system import python
from hpctrain.system.output import say, tell

EMPTY_STEP_S = 30.0
"""Longest time that a step which does nothing may take."""
PMIX_STEPS = 2
"""Steps of an attempt that have a PMIx server: preflight and launch."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """How the ranks of this attempt are started."""

    launcher: Launcher
    python: str
    """Interpreter of the ranks: node-local if the environment was staged."""
    copies: Mapping[str, str]
    """Node-local copies by source, as the run file writes it."""
    hosts: Mapping[int, str]
    """Hosts of ranks, if srun starts them and the preflight has seen them."""


def prepare(config: Config, run: RunDir, job: Job, whole: Job | None = None) -> Prepared:
    """Stages in and finds a launcher whose preflight passes.

    Args:
        config: with the site profile applied.
        run: the run folder, which exists.
        job: the allocation, or the part of it that ranks run on.
        whole: the allocation, spare nodes included, which get copies, too.

    Raises:
        UserError: a launcher, MPI type or file that does not exist, ranks that do not find each other.
        NoRequeue: a host that cannot take part; it is named.
        RunFailed: Slurm's controller stays away.
        Stopped: a person stopped the run meanwhile.
    """
    found = launchers(config, job)
    if any(isinstance(launcher, Srun) for launcher in found):
        skip_steps(run, PMIX_STEPS * unclean(Attempts(run).all()[:-1], job.id))
    interpreter, copies = stage_in(config, run, whole or job)
    if not config.launch.preflight:
        return Prepared(found[0], interpreter, copies, {})
    failed: list[tuple[Launcher, preflight.Fault]] = []
    for launcher in found:
        problems, hosts = check(config, run, job, launcher, interpreter)
        for problem in problems:
            say(f"preflight with {launcher.describe()}: {problem.what}")
        fatal = next((problem for problem in problems if problem.fatal), None)
        if fatal is None:
            return Prepared(launcher, interpreter, copies, hosts if isinstance(launcher, Srun) else {})
        if not fatal.launcher:
            for problem in of_nodes(problems, hosts):
                leave_out.note(config, run, problem.host or "", problem.what, Attempts(run).all()[-1].number)
            raise NoRequeue(f"preflight: {fatal.what}", fatal.fix, fatal.code)
        failed.append((launcher, fatal))
    what = "; ".join(f"{launcher.describe()}: {problem.what}" for launcher, problem in failed)
    raise UserError(f"preflight: {what}", failed[0][1].fix, failed[0][1].code)


def of_nodes(problems: Sequence[preflight.Fault], hosts: Mapping[int, str]) -> list[preflight.Fault]:
    """Those that only single nodes have; what all nodes have is left out. Pure."""
    own = [problem for problem in problems if problem.fatal and problem.host and not problem.launcher]
    return own if set(hosts.values()) - {problem.host for problem in own} else []


def launchers(config: Config, job: Job) -> list[Launcher]:
    """What may start the ranks here, best first."""
    offered = client.mpi_types() if shutil.which("srun") else []
    flavour, mpirun = None, None
    try:
        library = probe()
        flavour = library.flavour
        mpirun = MpiRun(find_mpirun(library), flavour)
    except HpctrainError:
        if config.task and job.ranks > 1 and not offered:
            raise
    slurm = config.launch.slurm
    if slurm.cpus_per_rank is None and (cores := os.environ.get("SLURM_CPUS_PER_TASK")):  # srun does not inherit it
        slurm = dataclasses.replace(slurm, cpus_per_rank=int(cores))
    launch = dataclasses.replace(config.launch, slurm=slurm)
    return candidates(launch, job, offered, mpirun, flavour, config.parallel.tensor > 1)


def unclean(attempts: Sequence[Attempt], job: str) -> int:
    """Earlier attempts of this job after which something of its steps may lie around on a node."""
    verdicts = [attempt.verdict for attempt in attempts if attempt.job == job]
    return sum(
        verdict is None
        or verdict.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)
        or verdict.code not in (*ORDERLY_CODES, Code.UNKNOWN)
        for verdict in verdicts
    )


def skip_steps(run: RunDir, number: int) -> None:
    """Uses up step numbers with empty steps.

    A slurmstepd that dies leaves the socket of its PMIx server on its node, named after job and step. Slurm numbers the
    steps of a requeued job from 0 again, so a step of the same number would find the address in use.
    """
    for _ in range(number):
        client.heard(run, empty_step(), {}, EMPTY_STEP_S)


def check(
    config: Config, run: RunDir, job: Job, launcher: Launcher, interpreter: str
) -> tuple[list[preflight.Fault], dict[int, str]]:
    """Problems that the ranks' reports show under one launcher, and the hosts of Slurm's tasks."""
    slurm = config.launch.slurm
    needs_mpi = bool(config.task) and job.ranks > 1
    gpus, cpus, tensor = slurm.gpus_per_node or 0, slurm.cpus_per_rank or 1, config.parallel.tensor
    expected = preflight.Expected(job.nodes, job.ranks, gpus, cpus, needs_mpi, tensor)
    options = [f"--run-dir={run.path}", f"--scratch={slurm.scratch or ''}"]
    command = python.module("hpctrain.launch.engines.slurm.probe", *options, interpreter=interpreter)
    command = [*slurm.wrap, *command, "--mpi"] if needs_mpi else command
    env = {**launcher.environment({**os.environ, **config.launch.env}), **config.launch.env}
    _, output = client.heard(run, launcher.words(command, env), env, 60 + job.ranks / 20)
    reports = preflight.reports(output.splitlines())
    problems = preflight.judge(reports, expected, client.hosts(job.nodelist))
    if any(problem.fatal for problem in problems):
        tell(output)
    return problems, preflight.hosts_of_tasks(reports)


STAGE_IN_S = 3600.0
"""Longest time that stage-in may take."""
STAGE_FROM_NODES = 32
"""Nodes from which on the environment is staged by default.

A rank makes some 41,000 file calls at its start, nearly all of them to import, and the first one on each node makes
them to the file server: 1.3 million on 32 nodes, more than a minute for a server that answers 20,000 a second.
"""


def stage_in(config: Config, run: RunDir, job: Job) -> tuple[str, dict[str, str]]:
    """Copies what launch.stage_in names to every node; the ranks' interpreter and the copies.

    Raises:
        NoRequeue: it did not end well on every node.
    """
    launch = config.launch
    if launch.stage_environment is None and stages_by_default(config, job):
        try:
            return copies_of(config, run, job, environment=True)
        except HpctrainError as error:  # no one asked for it
            say(f"the ranks import from {sys.prefix}, which is slow on many nodes: {error.what}")
    return copies_of(config, run, job, environment=bool(launch.stage_environment))


def stages_by_default(config: Config, job: Job) -> bool:
    """Whether the Python environment goes to many nodes: not an image, nor Python of the system, which nodes have."""
    is_own = sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").exists()
    return job.nodes >= STAGE_FROM_NODES and is_own and bool(config.task) and not config.launch.slurm.wrap


def copies_of(config: Config, run: RunDir, job: Job, environment: bool) -> tuple[str, dict[str, str]]:
    """See ``stage_in``."""
    launch = config.launch
    own = "python3" if config.task and config.launch.slurm.wrap else sys.executable  # inside an image the image's
    if not launch.stage_in and not environment:
        return own, {}
    folder = scratch_dir(launch.slurm.scratch or "") / f"hpctrain-{job.id}"
    command = python.module(
        "hpctrain.launch.engines.slurm.stage_on_node", str(folder), *map(_absolute, launch.stage_in)
    )
    if environment:
        archive = run.path / "environment.tar"
        stage_on_node.pack(Path(sys.prefix), archive)
        command += ["--unpack", str(archive)]
        own = str(folder / "environment" / Path(sys.executable).relative_to(sys.prefix))
    code, output = client.heard(run, once_a_node(job, command), launch.env, STAGE_IN_S)
    if told := preflight.reports(output.splitlines(), stage_on_node.MARK):
        raise NoRequeue(f"stage-in: {told[0]['what']}", told[0]["fix"], Code.read(told[0]["code"]))
    if code:
        tell(output)
        why = last_line(output) or f"it ended with code {code}"
        raise NoRequeue(f"stage-in: {why}", "see the job's log, or leave out launch.stage_in and stage_environment")
    return own, {name: str(stage_on_node.target(folder, Path(_absolute(name)))) for name in launch.stage_in}


def _absolute(name: str) -> str:
    return str(Path(name).absolute())


@dataclasses.dataclass
class Place:
    """The allocation of one job."""

    config: Config
    """As allocated: ``launch.nodes`` are those that ranks run on, ``launch.spare_nodes`` wait."""
    run_dir: RunDir
    whole: Job
    """With all its nodes."""
    job: Job
    """With those that the ranks of the attempt at hand run on."""
    prepared: Prepared | None = None
    """From the first attempt on: copies, interpreter, and the launcher whose preflight passed."""
    lost: set[str] = dataclasses.field(default_factory=set)
    """Nodes that an attempt has lost."""

    @classmethod
    def of(cls, config: Config, run_dir: RunDir, job: Job) -> Place:
        """For the first attempt; spare nodes, the last ones, wait."""
        if not config.launch.spare_nodes:
            return cls(config, run_dir, job, job)
        return cls(config, run_dir, job, job.on(client.hosts(job.nodelist)[: config.launch.nodes]))

    @property
    def facts(self) -> Attempt:
        """Of the attempt at hand, for run.json."""
        job = self.job
        return Attempt(job=job.id, restarts=job.restarts, nodes=job.nodes, ranks=job.ranks).under(self.config.parallel)

    def prepare(self) -> Prepared:
        """What starts the ranks; nothing is staged or checked twice. See ``allocation.prepare``."""
        if self.prepared is None:
            self.prepared = prepare(self.config, self.run_dir, self.job, self.whole)
        else:
            launcher = self.prepared.launcher.after_failure(self.job)
            self.prepared = dataclasses.replace(self.prepared, launcher=launcher)
        return self.prepared

    def choose(self, hosts: Sequence[str], more: Collection[str] = ()) -> list[str] | None:
        """Of these, the nodes for another attempt without ``more``; None if too few are left. Raises HpctrainError."""
        return choose(hosts, {*self.lost, *leave_out.avoided(self.config, self.run_dir), *more}, self.config)

    def can_lose(self, host: str) -> bool:
        """Whether enough nodes are left without one that Slurm does not reach either."""
        name = host.partition(".")[0]
        try:
            return self.choose(client.hosts(self.whole.nodelist), [name]) is not None and bool(client.unreached([name]))
        except (HpctrainError, OSError):
            return False

    def serves(self, verdict: RunVerdict) -> bool:
        """Whether another attempt can start here after a failed one, perhaps on other nodes; else requeueing is next.

        Not if Slurm or a person ends the job, or too few nodes are left.
        """
        if self.prepared is None or (verdict.code is Code.NODE and verdict.host is None):
            return False
        if verdict.code is Code.NODE and verdict.host is not None:
            self.lost.add(verdict.host.partition(".")[0])  # Slurm's names have no domain
        try:
            if who_ends(client.job_fields(self.job.id), self.job.restarts) is not Who.NOBODY:
                return False
            leave_out.note_culprit(self.config, self.run_dir)
            hosts = client.hosts(self.whole.nodelist)
            # A switch or a power supply takes several nodes; the next attempt would find them one by one.
            others = client.unreached(set(hosts) - self.lost) if verdict.code is Code.NODE else set()
            self.lost |= others if self.choose(hosts, others) else set()
            chosen = self.choose(hosts)
        except (HpctrainError, OSError) as error:
            say(f"not started again in this job: {error}")
            return False
        if chosen is None:
            return False
        if chosen != list(self.job.part or hosts):
            self.job = self.whole.on(chosen)
            self.prepared = dataclasses.replace(self.prepared, hosts={})  # which node has which rank is not known
            say(f"continuing on {', '.join(chosen)} with {self.job.ranks} rank{'s' if self.job.ranks != 1 else ''}")
        return True
