"""``hpctrain render | submit | status | logs | stop | cancel | resume``: all take a run file or a run folder."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpctrain.config import Config
from hpctrain.errors import ExitCode, UserError
from hpctrain.run_dir import RunDir

POLL_S = (0.5, 10.0)
"""First and longest pause between looks at the queue."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.py."""
    name = parser.get_default("command")
    parser.add_argument("target", metavar="run", help="run file or run folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if name in ("render", "submit", "resume"):
        parser.set_defaults(overrides=())
        parser.epilog = "Any key of the run file can be given as an option: --launch.nodes 4."
    if name == "render":
        parser.add_argument("--portable", action="store_true", help="a script that takes any run file as its argument")
    if name in ("render", "submit"):
        parser.add_argument(
            "--array", action="append", default=[], metavar="SWEEP", help="file of options, or key=v1,v2"
        )
        parser.add_argument("--at-once", type=int, metavar="N", help="elements of the array that run at the same time")
    if name in ("submit", "resume"):
        parser.add_argument("--dry-run", action="store_true", help="print the script and what would be run")
        parser.add_argument(
            "--chain", type=int, default=1, metavar="N", help="N jobs that follow each other, no requeue"
        )
        parser.add_argument("--exclude", action="append", default=[], metavar="HOST", help="hosts not to use")
        parser.add_argument("--after", action="append", default=[], metavar="JOB", help="start when these ended well")
        parser.add_argument("--wait", action="store_true", help="return when the run has ended")
        parser.add_argument("--parsable", action="store_true", help="print the job id only")
    if name == "logs":
        parser.add_argument("--rank", help="a rank's number, or 'job' for the job's own log")
        parser.add_argument("--attempt", type=int, help="an earlier attempt's number")
        parser.add_argument("--follow", action="store_true", help="go on printing until the job ends")
        parser.add_argument("--first-error", action="store_true", help="only the log that shows the first error")


def run(args: argparse.Namespace) -> int:
    """See cli.py."""
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "render": render, "submit": submit, "resume": submit, "status": status, "logs": logs, "stop": stop, "cancel": cancel,
    }  # fmt: skip
    return commands[args.command](args)


def render(args: argparse.Namespace) -> int:
    """Prints the script; needs no Slurm."""
    from hpctrain.launch.slurm import submission

    config, folder = submission.open_run(args.target, args.overrides)
    if args.portable:
        script = submission.portable(config)
    else:
        script = submission.plan(config, folder, submission.sweep(args.array), args.at_once).script
    print(json.dumps({"script": script}) if args.json else script, end="\n" if args.json else "")
    return ExitCode.DONE


def submit(args: argparse.Namespace) -> int:
    """Writes the run folder and submits its script."""
    from hpctrain.launch.slurm import submission

    config, folder = submission.open_run(args.target, args.overrides)
    if args.chain < 1:
        raise UserError(f"--chain is {args.chain}", "give 1 or more")
    if args.command == "resume" and not folder.run_yaml.exists():
        raise UserError(f"{folder.path} holds no run to resume", "start it with hpctrain submit")
    planned = submission.plan(
        _excluding(config, args.exclude),
        folder,
        submission.sweep(getattr(args, "array", [])),
        getattr(args, "at_once", None),
        args.chain,
    )
    options = [f"--dependency=afterok:{':'.join(args.after)}", "--kill-on-invalid-dep=yes"] if args.after else []
    if args.dry_run:
        command = shlex.join(["sbatch", *options, str(planned.script_file)])
        _print(
            args,
            {"script": planned.script, "command": command, "chain": args.chain},
            [planned.script, f"# would run: {command}"],
        )
        return ExitCode.DONE
    submission.client.find("sbatch")
    submission.refuse_second(folder)
    submission.write(planned)
    past = submission.submissions(folder)
    ids = submission.submit(planned, options, args.chain, past[-1].cwd if past and args.command == "resume" else None)
    launch = planned.config.launch
    what = f"{launch.nodes} nodes, {planned.config.name}" + (
        f", {len(planned.elements)} elements" if planned.elements else ""
    )
    said = {"jobs": ids, "run_dir": str(folder.path), "script": str(planned.script_file)}
    _print(
        args,
        said,
        ids[:1] if args.parsable else [f"submitted job {', '.join(ids)} ({what})", f"  run folder {folder.path}"],
    )
    return _wait(folder, ids) if args.wait else ExitCode.DONE


def status(args: argparse.Namespace) -> int:
    """Prints where the run, or each element of an array, stands."""
    from hpctrain.launch.slurm import client, status

    client.find("squeue")
    found = [status.safe_of_run(run) for run in _runs(args.target)]
    _print(args, [each.plain() for each in found], status.lines(found))
    return ExitCode.DONE


def logs(args: argparse.Namespace) -> int:
    """Prints logs of ranks."""
    from hpctrain.launch.slurm import logs, submission

    run = _folder(args.target)
    found = logs.find(run, args.rank, args.attempt)
    if args.first_error:
        error = logs.first_error(found)
        said = {"file": str(error[0].path), "rank": error[0].rank, "text": error[1]} if error else {}
        _print(args, said, [f"==> {error[0].path} <==", error[1]] if error else ["no error in these logs"])
        return ExitCode.DONE
    if not found:
        raise UserError(f"{run.logs} holds no such log", "hpctrain status tells whether the job has started")
    if args.follow:
        last = found[0] if args.rank else next((log for log in found if log.rank == "0"), found[-1])
        for text in logs.follow(last.path, lambda: not submission.alive(run), 0.5):
            sys.stdout.write(text)
            sys.stdout.flush()
        return ExitCode.DONE
    if args.json:
        print(json.dumps([{"file": str(log.path), "rank": log.rank, "attempt": log.attempt} for log in found]))
        return ExitCode.DONE
    for log in found:
        print(f"==> {log.path} <==")
        print(log.path.read_text(errors="replace"), end="")
    return ExitCode.DONE


def stop(args: argparse.Namespace) -> int:
    """Asks a running job to save and stop; a waiting one is taken out of the queue."""
    from hpctrain.launch.slurm import client, submission

    said = []
    for run in _runs(args.target):
        entries = submission.alive(run)
        waiting = [entry.id for entry in entries if entry.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD")]
        running = [entry.id for entry in entries if entry.id not in waiting]
        if waiting:
            client.cancel(waiting)
        if running:
            run.request_stop(f"{getpass.getuser()}@{socket.gethostname()}")
        said.append({"run": str(run.path), "asked": running, "cancelled": waiting})
    text = [
        f"{each['run']}: " + (f"asked job {', '.join(each['asked'])} to save a checkpoint and stop" if each["asked"]
        else f"took job {', '.join(each['cancelled'])} out of the queue" if each["cancelled"] else "no job runs or waits")
        for each in said
    ]  # fmt: skip
    _print(args, said, text)
    return ExitCode.DONE


def cancel(args: argparse.Namespace) -> int:
    """Ends the run's jobs now; what was saved stays."""
    from hpctrain.launch.slurm import client, submission

    ids = [entry.id for run in _runs(args.target) for entry in submission.alive(run)]
    if ids:
        client.cancel(ids)
    _print(args, {"cancelled": ids}, [f"cancelled job {', '.join(ids)}" if ids else "no job runs or waits"])
    return ExitCode.DONE


def _excluding(config: Config, hosts: Sequence[str]) -> Config:
    if not hosts:
        return config
    slurm = dataclasses.replace(config.launch.slurm, exclude=(*config.launch.slurm.exclude, *hosts))
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, slurm=slurm))


def _folder(target: str) -> RunDir:
    """The run folder, which commands that only look need no valid run file for."""
    from hpctrain.launch.slurm import submission

    path = Path(target)
    if path.is_dir():
        return RunDir(path.absolute())
    return submission.open_run(target)[1]


def _runs(target: str) -> list[RunDir]:
    """The run, or the elements of an array."""
    run = _folder(target)
    if not run.path.is_dir():
        raise UserError(f"there is no run folder {run.path}", "submit the run first, or give its folder")
    elements = [path.parent for path in run.path.glob("*/run.yaml") if path.parent.name.isdigit()]
    return [RunDir(path) for path in sorted(elements, key=lambda path: int(path.name))] or [run]


def _wait(folder: RunDir, ids: Sequence[str]) -> int:
    """Returns when no job of the run waits or runs: done only if Slurm says that the last one completed."""
    from hpctrain.launch.slurm import client, submission

    pause, longest = POLL_S
    while submission.alive(folder):
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
    last = submission.submissions(folder)[-1].job
    states = {entry.state for entry in client.queue([last])}
    return ExitCode.DONE if states == {"COMPLETED"} else ExitCode.FAILURE


def _print(args: argparse.Namespace, data: Any, text: Sequence[str]) -> None:
    print(json.dumps(data) if args.json else "\n".join(text))
