"""A job's nodes as the place of several attempts: what was prepared for the first one holds for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hpctrain.config.sections import Config
from hpctrain.errors import Code, HpctrainError
from hpctrain.launch.engines.slurm import allocation, client, leave_out
from hpctrain.launch.engines.slurm.job import Job, Who, who_ends
from hpctrain.launch.supervisor import choose
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.folder import RunDir
from hpctrain.run.verdict import RunVerdict
from hpctrain.system.output import say


@dataclass
class Place:
    """The allocation of one job."""

    config: Config
    """As allocated: ``launch.nodes`` are those that ranks run on, ``launch.spare_nodes`` wait."""
    run_dir: RunDir
    whole: Job
    """With all its nodes."""
    job: Job
    """With those that the ranks of the attempt at hand run on."""
    prepared: allocation.Prepared | None = None
    """From the first attempt on: copies, interpreter, and the launcher whose preflight passed."""
    lost: set[str] = field(default_factory=set)
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

    def prepare(self) -> allocation.Prepared:
        """What starts the ranks; nothing is staged or checked twice. See ``allocation.prepare``."""
        if self.prepared is None:
            self.prepared = allocation.prepare(self.config, self.run_dir, self.job, self.whole)
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
            return self.choose(client.hosts(self.whole.nodelist), [name]) is not None and not client.answers(name)
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
            chosen = self.choose(hosts)
        except (HpctrainError, OSError) as error:
            say(f"not started again in this job: {error}")
            return False
        if chosen is None:
            return False
        if chosen != list(self.job.part or hosts):
            self.job = self.whole.on(chosen)
            self.prepared = dataclasses.replace(self.prepared, hosts={})  # which node has which rank is not known
            say(f"continuing on {', '.join(chosen)} with {self.job.ranks} ranks")
        return True
