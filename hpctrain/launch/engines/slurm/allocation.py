"""Prepares a Slurm job before the ranks start: stages files in, and finds a launcher that works.

For staging, every node copies the sources named in the run file to its own disk (``stage_on_node``). ``JobNodes``
reuses what was prepared for the job's first attempt in all later ones.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.config.sections import Config
from hpctrain.errors import Code, ExitCode, HpctrainError, NoRequeue, RunFailed, UserError
from hpctrain.launch.engines.slurm import client, leave_out, preflight, stage_on_node
from hpctrain.launch.engines.slurm.directives import keeps_job
from hpctrain.launch.engines.slurm.job import Job, Who, who_ends
from hpctrain.launch.engines.slurm.launcher import EMPTY_STEP, Launcher, Srun, candidates, once_a_node
from hpctrain.launch.engines.slurm.probe import MARK, scratch_dir
from hpctrain.launch.mpi_library import MpiRun, find_mpirun, probe
from hpctrain.launch.postmortem import last_line
from hpctrain.launch.supervisor import choose, say_continues
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.verdict import ORDERLY_CODES, RunVerdict
from hpctrain.system import python
from hpctrain.system.output import say, tell

EMPTY_STEP_S = 30.0
"""Timeout in seconds for a step that does nothing."""
PMIX_STEPS = 3
"""Most steps with a PMIx server that an attempt has: preflight, its measurements on GPUs, launch."""
MOST_SAID = 8
"""Most problems that are printed one by one."""
MEASURE_S = 180.0
"""Timeout in seconds for measuring links and GPUs, which imports PyTorch on every rank."""


@dataclasses.dataclass(frozen=True)
class PreparedRanks:
    """How to start the ranks of an attempt."""

    launcher: Launcher
    python: str
    """The ranks' Python interpreter; node-local if the environment was staged."""
    copies: Mapping[str, str]
    """Node-local copies by source, with sources as the run file writes them."""
    hosts: Mapping[int, str]
    """Host by rank; empty unless srun starts the ranks and the preflight has seen their hosts."""


def prepare(config: Config, run: RunDir, job: Job, whole: Job | None = None) -> PreparedRanks:
    """Stages files in and finds a launcher whose preflight passes.

    Args:
        config: configuration with the site profile applied.
        run: the run folder, which must exist.
        job: the allocation, or the part of it that ranks run on.
        whole: the allocation including spare nodes, which get copies too.

    Raises:
        UserError: a launcher, MPI type or file does not exist, or ranks do not find each other.
        NoRequeue: a host is unusable (it is named), or staging failed.
        RunFailed: Slurm's controller stays down, or a node does not start its ranks (code NODE).
        Stopped: a person stopped the run meanwhile.
    """
    found = launchers(config, job)
    if any(isinstance(launcher, Srun) for launcher in found):
        skip_steps(run, PMIX_STEPS * unclean(Attempts(run).all()[:-1], job.id))
    interpreter, copies = stage_in(config, run, whole or job)
    if not config.launch.preflight:
        return PreparedRanks(found[0], interpreter, copies, {})
    failed, gone = list[tuple[Launcher, preflight.Fault]](), False
    for launcher in found if len(found) > 1 else found * 2:  # MPI may fail to start once
        problems, hosts = check(config, run, job, launcher, interpreter)
        for problem in problems[:MOST_SAID]:
            say(f"preflight with {launcher.describe()}: {problem.what}")
        if (more := len(problems) - MOST_SAID) > 0:
            say(f"preflight with {launcher.describe()}: {more} more problems, mostly the same on other nodes")
        fatal = next((problem for problem in problems if problem.fatal), None)
        if fatal is None:
            return PreparedRanks(launcher, interpreter, copies, hosts if isinstance(launcher, Srun) else {})
        if not fatal.launcher:
            for problem in of_nodes(problems, hosts):
                exclude(config, run, job, problem.host or "", problem.what)
            raise NoRequeue(f"preflight: {fatal.what}", fatal.fix, fatal.code)
        failed.append((launcher, fatal))
        if gone := fatal.code is Code.NODE and bool(client.unreached([fatal.host or ""])):
            break
    what = "; ".join(dict.fromkeys(f"{launcher.describe()}: {problem.what}" for launcher, problem in failed))
    silent = next((problem.host for _, problem in failed if problem.code is Code.NODE), None)
    *_, before, _ = [Attempt(), *Attempts(run).all()]
    again = before.verdict is not None and before.verdict.before_ranks and before.verdict.code is Code.NODE
    if silent and (gone or not again):  # one node after the other: it is not the nodes
        exclude(config, run, job, silent, what)
        raise RunFailed(f"preflight: {what}", "the job starts again without that node", Code.NODE)
    raise UserError(f"preflight: {what}", failed[0][1].fix, failed[0][1].code)


def exclude(config: Config, run: RunDir, job: Job, host: str, why: str) -> None:
    """Excludes a node from the next start, unless Slurm is ending the job: then steps fail on good nodes too."""
    if who_ends(client.job_fields(job.id), job.restarts) is Who.NOBODY:
        leave_out.note(config, run, host, why, Attempts(run).all()[-1].number)


def of_nodes(problems: Sequence[preflight.Fault], hosts: Mapping[int, str]) -> list[preflight.Fault]:
    """Returns the fatal faults of single nodes; none if every node has one, which points to another cause. Pure."""
    own = [problem for problem in problems if problem.fatal and problem.host and not problem.launcher]
    return own if set(hosts.values()) - {problem.host for problem in own} else []


def launchers(config: Config, job: Job) -> list[Launcher]:
    """Returns the launchers that may start the ranks here, best first."""
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
    """Counts the earlier attempts of this job whose steps may have left something on a node."""
    verdicts = [attempt.verdict for attempt in attempts if attempt.job == job]
    return sum(
        verdict is None
        or verdict.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)
        or verdict.code not in (*ORDERLY_CODES, Code.UNKNOWN)
        for verdict in verdicts
    )


def skip_steps(run: RunDir, number: int) -> None:
    """Runs empty steps to skip step numbers.

    A slurmstepd that dies leaves the socket of its PMIx server on its node, named after job and step. Slurm numbers the
    steps of a requeued job from 0 again, so a step with the same number would find the address in use.
    """
    for _ in range(number):
        client.heard(run, EMPTY_STEP, {}, EMPTY_STEP_S)


def check(
    config: Config, run: RunDir, job: Job, launcher: Launcher, interpreter: str
) -> tuple[list[preflight.Fault], dict[int, str]]:
    """Runs the preflight under one launcher; returns the problems it finds, and the hosts of Slurm's tasks."""
    slurm = config.launch.slurm
    needs_mpi = bool(config.task) and job.ranks > 1
    gpus = slurm.gpus_per_node or 0
    cpus = slurm.cpus_per_rank or 1
    tensor = config.parallel.tensor
    expected = preflight.Expected(job.nodes, job.ranks, gpus, cpus, needs_mpi, tensor)
    options = [f"--run-dir={run.path}", f"--scratch={slurm.scratch or ''}"]
    command = python.module("hpctrain.launch.engines.slurm.probe", *options, interpreter=interpreter)
    command = [*slurm.wrap, *command, "--mpi"] if needs_mpi else command
    env = {**launcher.environment({**os.environ, **config.launch.env}), **config.launch.env}
    _, output = client.heard(run, launcher.words(command, env), env, 60 + job.ranks / 20)
    reports = preflight.reports(output.splitlines())
    problems = preflight.judge(reports, expected, client.hosts(job.nodelist))
    if needs_mpi and gpus and not any(problem.fatal for problem in problems):
        command = [*slurm.wrap, *python.module("hpctrain.backends.torch.measure", interpreter=interpreter)]
        _, output = client.heard(run, launcher.words(command, env), env, MEASURE_S + job.ranks / 20)
        speeds = preflight.speeds(output.splitlines())
        for topic, figure in speeds.sentences() if speeds else [("links", f"not measured: {last_line(output)}")]:
            say(f"preflight: {topic}: {figure}")
        problems += preflight.slow(speeds) if speeds else []
    if any(problem.fatal for problem in problems):
        tell("\n".join(line for line in output.splitlines() if MARK not in line))
    return problems, preflight.hosts_of_tasks(reports)


STAGE_IN_S = 3600.0
"""Timeout in seconds for stage-in."""
STAGE_FROM_NODES = 32
"""Number of nodes from which the Python environment is staged by default.

A rank makes some 41,000 file system calls at start-up, nearly all for imports. The first rank on each node sends them
to the file server: 1.3 million on 32 nodes, over a minute for a server that answers 20,000 a second.
"""


def stage_in(config: Config, run: RunDir, job: Job) -> tuple[str, dict[str, str]]:
    """Copies the sources in launch.stage_in to every node; returns the ranks' interpreter, and the copies by source.

    Raises:
        NoRequeue: staging failed on a node.
    """
    launch = config.launch
    if launch.stage_environment is None and stages_by_default(config, job):
        try:
            return copies_of(config, run, job, environment=True)
        except HpctrainError as error:  # not requested by the user, so not fatal
            say(f"the ranks import from {sys.prefix}, which is slow on many nodes: {error.what}")
    return copies_of(config, run, job, environment=bool(launch.stage_environment))


def stages_by_default(config: Config, job: Job) -> bool:
    """Whether to stage the environment by default: on many nodes, unless it is an image or the system's Python."""
    is_own = sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").exists()
    return job.nodes >= STAGE_FROM_NODES and is_own and bool(config.task) and not config.launch.slurm.wrap


def copies_of(config: Config, run: RunDir, job: Job, environment: bool) -> tuple[str, dict[str, str]]:
    """See ``stage_in``; ``environment``: stage the Python environment too."""
    launch = config.launch
    own = "python3" if config.task and config.launch.slurm.wrap else sys.executable  # with wrap, the image's Python
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
    if failures := preflight.reports(output.splitlines(), stage_on_node.MARK):
        raise NoRequeue(f"stage-in: {failures[0]['what']}", failures[0]["fix"], Code.read(failures[0]["code"]))
    if code:
        tell(output)
        why = last_line(output) or f"it ended with code {code}"
        raise NoRequeue(f"stage-in: {why}", "see the job's log, or leave out launch.stage_in and stage_environment")
    return own, {name: str(stage_on_node.target(folder, Path(_absolute(name)))) for name in launch.stage_in}


def _absolute(name: str) -> str:
    return str(Path(name).absolute())


@dataclasses.dataclass
class JobNodes:
    """The allocation of one job, from which each attempt uses some nodes."""

    config: Config
    """Configuration as allocated: ranks run on ``launch.nodes`` nodes, and ``launch.spare_nodes`` wait."""
    run_dir: RunDir
    whole: Job
    """The job with all its nodes."""
    job: Job
    """The job with the nodes of the current attempt."""
    prepared: PreparedRanks | None = None
    """Copies, interpreter, and the launcher whose preflight passed; None before the first attempt."""
    lost: set[str] = dataclasses.field(default_factory=set)
    """Nodes that attempts have lost."""
    standby: subprocess.Popen[bytes] | None = None
    """srun of the step that watches the supervisor; see ``standby``."""

    @classmethod
    def of(cls, config: Config, run_dir: RunDir, job: Job) -> JobNodes:
        """Returns the place for the first attempt; the last nodes wait as spares."""
        if not config.launch.spare_nodes:
            return cls(config, run_dir, job, job)
        return cls(config, run_dir, job, job.on(client.hosts(job.nodelist)[: config.launch.nodes]))

    @property
    def facts(self) -> Attempt:
        """Facts about the current attempt, for run.json."""
        job = self.job
        return Attempt(job=job.id, restarts=job.restarts, nodes=job.nodes, ranks=job.ranks).under(self.config.parallel)

    def prepare(self) -> PreparedRanks:
        """Returns how to start the ranks; stages and checks only the first time. See ``allocation.prepare``."""
        if self.prepared is None:
            self.prepared = prepare(self.config, self.run_dir, self.job, self.whole)
        else:
            launcher = self.prepared.launcher.after_failure(self.job)
            self.prepared = dataclasses.replace(self.prepared, launcher=launcher)
        return self.prepared

    def watch_supervisor(self) -> None:
        """Has the last node in use requeue the job if this node is lost and Slurm then keeps the job."""
        if self.standby is not None:  # its node may be lost
            self.standby.terminate()
        hosts = self.job.part or client.hosts(self.job.nodelist)
        if keeps_job(self.config.launch) and len(hosts) > 1 and shutil.which("srun"):
            command = python.module("hpctrain.launch.engines.slurm.standby", str(self.run_dir.path))
            self.standby = client.begin_step(once_a_node(self.job.on(hosts[-1:]), command, overlap=True))

    def choose(self, hosts: Sequence[str], more: Collection[str] = ()) -> list[str] | None:
        """Chooses nodes for the next attempt from ``hosts``, without lost or avoided ones and ``more``.

        None if too few are left. Raises HpctrainError.
        """
        return choose(hosts, {*self.lost, *leave_out.avoided(self.config, self.run_dir), *more}, self.config)

    def can_lose(self, host: str) -> bool:
        """Whether enough nodes remain without ``host``, and Slurm cannot reach it either."""
        name = host.partition(".")[0]
        try:
            return self.choose(client.hosts(self.whole.nodelist), [name]) is not None and bool(client.unreached([name]))
        except (HpctrainError, OSError):
            return False

    def serves(self, verdict: RunVerdict) -> bool:
        """Whether another attempt can start in this job after a failed one, perhaps on other nodes.

        Not if Slurm or a person is ending the job, or too few nodes are left; then the job is requeued. Chooses the
        nodes for the next attempt.
        """
        if self.prepared is None:
            return False
        if verdict.code is Code.NODE:
            if verdict.host is None:
                return False
            self.lost.add(verdict.host.partition(".")[0])  # Slurm's names have no domain
        try:
            if who_ends(client.job_fields(self.job.id), self.job.restarts) is not Who.NOBODY:
                return False
            leave_out.note_culprit(self.config, self.run_dir)
            hosts = client.hosts(self.whole.nodelist)
            # A broken switch or power supply takes down several nodes; attempts would find them one by one.
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
            self.prepared = dataclasses.replace(self.prepared, hosts={})  # the ranks' hosts are not known any more
            say_continues(chosen, self.job.ranks)
        return True
