"""Slurm as a scheduler; see ``launch.engines.scheduler``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hpctrain.config.sections import Config
from hpctrain.launch.engines.jobs import Plan, Wish, submissions, write
from hpctrain.launch.engines.scheduler import to_submit
from hpctrain.launch.engines.slurm import client, leave_out, submission
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import QueueEntry


class Slurm:
    """Slurm; implements ``Scheduler``."""

    name = "slurm"
    title = "Slurm"
    ends_gently = False

    def plan(self, config: Config, run: RunDir, wish: Wish) -> Plan:
        """Returns a plan with an sbatch script."""
        if wish.portable:
            return Plan(config, run, submission.portable(config))
        slurm = dataclasses.replace(config.launch.slurm, exclude=(*config.launch.slurm.exclude, *wish.exclude))
        config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, slurm=slurm))
        return submission.plan(config, run, wish.elements, wish.at_once, wish.chain)

    def command(self, planned: Plan, wish: Wish) -> Sequence[str]:
        """Returns the sbatch command."""
        return ["sbatch", *leave_out.option(planned.config, planned.run), *after(wish), str(planned.script_file)]

    def submit(self, planned: Plan, wish: Wish) -> tuple[list[str], Sequence[str]]:
        """Submits with sbatch."""
        client.find("sbatch")
        if wish.after:
            submission.check_after(wish.after)
        without = leave_out.option(planned.config, planned.run)
        with to_submit(self, planned.run):
            write(planned)
            past = submissions(planned.run, self.name) if wish.resumes else []
            cwd = past[-1].cwd if past else None
            ids = submission.submit(planned, after(wish), wish.chain, cwd, without)
        return ids, [f"{without[0]} (hpctrain nodes tells why)"] if without else []

    def states(self, jobs: Sequence[Sequence[str]], timeout_s: float, ended: bool) -> Mapping[str, QueueEntry]:
        """Queries the queue once for all jobs, and with ``ended`` accounting for those that the queue has forgotten."""
        if not ended:
            return {entry.id: entry for entry in client.queue([job for each in jobs for job in each], timeout_s)}
        arrays = dict.fromkeys(job.partition("_")[0] for each in jobs for job in each)  # one word for many elements
        found = {entry.id: entry for entry in client.queue(list(arrays), timeout_s)}
        forgotten = [each[-1] for each in jobs if each and not any(job in found for job in each)]
        return found | {entry.id: entry for entry in client.accounted(forgotten, timeout_s)}

    def end(self, jobs: Sequence[tuple[RunDir, Sequence[str]]]) -> tuple[list[str], list[str]]:
        """Ends jobs with scancel."""
        client.find("scancel")
        ids, left = [], []
        for run, given in jobs:
            own, others = submission.apart(run, given)
            ids += own
            left += others
        if ids:
            client.cancel(ids)
        return ids, left

    def log(self, run: RunDir, job: str) -> str:
        """Returns an empty text, since the job's log is in the run folder."""
        return ""


def after(wish: Wish) -> list[str]:
    """Returns sbatch's options for the jobs that must end first."""
    return [f"--dependency=afterok:{':'.join(wish.after)}", "--kill-on-invalid-dep=yes"] if wish.after else []


SLURM = Slurm()
