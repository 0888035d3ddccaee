"""Requeues a job whose first node is lost, from another of its nodes: ``python -m`` this module and a run folder.

With --no-kill, Slurm keeps a job without its batch script, and so without a supervisor, until the time limit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hpctrain.config.loading import load
from hpctrain.errors import Code
from hpctrain.launch.engines.slurm import client
from hpctrain.launch.engines.slurm.job import Who, current, who_ends
from hpctrain.launch.engines.slurm.requeue import take_out
from hpctrain.launch.engines.slurm.supervise import follow
from hpctrain.launch.supervisor import record
from hpctrain.run import live_lock
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import collect
from hpctrain.run.verdict import failed_with
from hpctrain.system.retry import retry_or_fail

LOOK_S = 10.0


def main() -> int:
    """Waits until the supervisor's node is lost, then requeues the job, or ends it if that is not allowed."""
    run_dir, job = RunDir(Path(sys.argv[1])), current()
    assert job is not None, "a step of a job"
    while (host := lost_host(run_dir)) is None:
        time.sleep(LOOK_S)
    number = Attempts(run_dir).all()[-1].number
    what = f"{host} was lost, and the supervisor with it"
    verdict = failed_with(Code.NODE, what, "the same command resumes it", host=host)
    record(run_dir, number, verdict, collect(run_dir, number))
    code = follow(verdict, retry_or_fail(lambda: load(run_dir.run_yaml)), run_dir, job, parent=-1)
    if (fields := client.job_fields(job.id)) and who_ends(fields, job.restarts) is not Who.REQUEUE:
        take_out([job.id])
    return code


def lost_host(run_dir: RunDir) -> str | None:
    """Returns the supervisor's node if neither the supervisor nor Slurm's daemon there gives a sign of life."""
    holder = live_lock.read(run_dir.lock_file)
    if holder is None or live_lock.silence_s(run_dir.lock_file) <= live_lock.STALE_S:
        return None
    return next(iter(client.unreached([holder.host.partition(".")[0]])), None)


if __name__ == "__main__":
    sys.exit(main())
