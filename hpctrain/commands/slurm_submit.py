"""``hpctrain render | submit | resume``."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import time
from collections.abc import Sequence

from hpctrain.commands.slurm import show
from hpctrain.config.sections import Config
from hpctrain.errors import ExitCode, UserError
from hpctrain.launch.engines.slurm import client, leave_out, submission
from hpctrain.run import RunView, Word, which
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import TO_SUBMIT, LiveLock, myself

POLL_S = (0.5, 10.0)
"""First and longest pause between looks at the queue."""


def render(args: argparse.Namespace) -> int:
    """Prints the script; needs no Slurm."""
    config, folder = which.configured(args.target, args.overrides)
    if args.portable:
        script = submission.portable(config)
    else:
        script = submission.plan(config, folder, submission.sweep(args.array), args.at_once).script
    show(args, {"script": script}, [script.rstrip("\n")])
    return ExitCode.DONE


def submit(args: argparse.Namespace) -> int:
    """Writes the run folder and submits its script."""
    resumes = args.command == "resume"
    config, folder = which.configured(args.target, args.overrides)
    if args.chain < 1:
        raise UserError(f"--chain is {args.chain}", "give 1 or more")
    if resumes and not folder.run_yaml.exists():
        raise UserError(f"{folder.path} holds no run to resume", "start it with hpctrain submit")
    if resumes and which.elements_of(folder):
        raise UserError(f"{folder.path} is an array of runs", f"resume one of them: hpctrain resume {args.target}/0")
    array = [] if resumes else submission.sweep(args.array)
    planned = submission.plan(
        _excluding(config, args.exclude), folder, array, None if resumes else args.at_once, args.chain
    )
    if resumes and not args.overrides:
        refuse_finished(planned)
    options = [f"--dependency=afterok:{':'.join(args.after)}", "--kill-on-invalid-dep=yes"] if args.after else []
    without = leave_out.option(planned.config, folder)
    if args.dry_run:
        command = shlex.join(["sbatch", *without, *options, str(planned.script_file)])
        said = {"script": planned.script, "command": command, "chain": args.chain}
        show(args, said, [planned.script, f"# would run: {command}"])
        return ExitCode.DONE
    client.find("sbatch")
    if args.after:
        submission.check_after(args.after)
    folder.create()
    with LiveLock(folder, myself(), TO_SUBMIT).held():  # until the job is noted, where the next one looks for it
        submission.refuse_second(folder)
        submission.write(planned)
        past = submission.submissions(folder)
        ids = submission.submit(planned, options, args.chain, past[-1].cwd if past and resumes else None, without)
    said = {"jobs": ids, "run_dir": str(folder.path), "script": str(planned.script_file)}
    text = [f"submitted job {', '.join(ids)}: {_shape(planned)}", f"  run folder {folder.path}"]
    text += [f"  {without[0]} (hpctrain nodes tells why)"] if without else []
    show(args, said, ids[-1:] if args.parsable else text)
    return _wait(folder) if args.wait else ExitCode.DONE


def refuse_finished(planned: submission.Plan) -> None:
    """Nothing is left to resume.

    Raises:
        UserError: the run has finished, and no option asks for more than it did.
    """
    found = RunView(planned.run.path).snapshot()
    if found.outcome.word is Word.FINISHED:
        reason = (found.newest.verdict.reason if found.newest and found.newest.verdict else "") or found.outcome.value
        fix = "nothing to do; to train on, say how far: hpctrain resume ... --train.epochs N"
        raise UserError(f"{planned.run.path} has finished: {reason}", fix)


def _shape(planned: submission.Plan) -> str:
    nodes = planned.config.launch.nodes
    shape = f"{planned.config.name} on {nodes} node" + ("s" if nodes > 1 else "")
    return f"{len(planned.elements)} runs of {shape}" if planned.elements else shape


def _excluding(config: Config, hosts: Sequence[str]) -> Config:
    slurm = dataclasses.replace(config.launch.slurm, exclude=(*config.launch.slurm.exclude, *hosts))
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, slurm=slurm))


def _wait(folder: RunDir) -> int:
    """Returns when no job of the run waits or runs: done only if Slurm says that all of the last one completed."""
    pause, longest = POLL_S
    while submission.goes_on(folder):
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
    last = submission.submissions(folder)[-1].job
    elements = [job for run in which.elements_of(folder) if (job := last_worked(run)).startswith(f"{last}_")]
    jobs = elements or [last_worked(folder)]
    known = {entry.id: entry.state for entry in client.queue(jobs)}
    known |= {entry.id: entry.state for entry in client.accounted([job for job in jobs if job not in known])}
    return ExitCode.DONE if all(known.get(job) == "COMPLETED" for job in jobs) else ExitCode.FAILURE


def last_worked(run: RunDir) -> str:
    """Of the jobs that were submitted together last the one that ran last: of a chain, those after the end never do."""
    jobs = submission.submissions(run)
    begin = max((index for index, each in enumerate(jobs) if each.chain == 0 and each.replaces is None), default=0)
    ours = [each.job for each in jobs[begin:]]
    return next((a.job for a in reversed(Attempts(run).all()) if a.job in ours), ours[-1] if ours else "")
