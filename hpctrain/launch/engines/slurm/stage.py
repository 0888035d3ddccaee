"""Staging: has every node copy what the run file names to its own disk, by ``stage_on_node``, and waits for all."""

from __future__ import annotations

import sys
from pathlib import Path

from hpctrain.config.sections import Config
from hpctrain.errors import Code, HpctrainError, NoRequeue
from hpctrain.launch.engines.slurm import preflight, stage_on_node
from hpctrain.launch.engines.slurm.helper_steps import heard
from hpctrain.launch.engines.slurm.job import Job
from hpctrain.launch.engines.slurm.launcher import once_a_node
from hpctrain.launch.engines.slurm.probe import scratch_dir
from hpctrain.launch.postmortem import last_line
from hpctrain.run.folder import RunDir
from hpctrain.system import python
from hpctrain.system.output import say, tell

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
            return _stage(config, run, job, environment=True)
        except HpctrainError as error:  # no one asked for it
            say(f"the ranks import from {sys.prefix}, which is slow on many nodes: {error.what}")
    return _stage(config, run, job, environment=bool(launch.stage_environment))


def stages_by_default(config: Config, job: Job) -> bool:
    """Whether the Python environment goes to many nodes: not an image, nor Python of the system, which nodes have."""
    is_own = sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").exists()
    return job.nodes >= STAGE_FROM_NODES and is_own and bool(config.task) and not config.launch.slurm.wrap


def interpreter_of(config: Config) -> str:
    """The ranks' interpreter: this one, but inside an image the image's."""
    return "python3" if config.task and config.launch.slurm.wrap else sys.executable


def _stage(config: Config, run: RunDir, job: Job, environment: bool) -> tuple[str, dict[str, str]]:
    """See ``stage_in``."""
    launch = config.launch
    own = interpreter_of(config)
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
    code, output = heard(run, once_a_node(job.nodes, command), launch.env, STAGE_IN_S)
    if told := preflight.reports(output.splitlines(), stage_on_node.MARK):
        raise NoRequeue(f"stage-in: {told[0]['what']}", told[0]["fix"], Code.read(told[0]["code"]))
    if code:
        tell(output)
        why = last_line(output) or f"it ended with code {code}"
        raise NoRequeue(f"stage-in: {why}", "see the job's log, or leave out launch.stage_in and stage_environment")
    return own, {name: str(stage_on_node.target(folder, Path(_absolute(name)))) for name in launch.stage_in}


def _absolute(name: str) -> str:
    return str(Path(name).absolute())
