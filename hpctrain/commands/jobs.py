"""``hpctrain render | submit | resume | status | logs | stop | cancel | nodes``, for a run file or a run folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import getpass
import os
import shlex
import socket
import time
from pathlib import Path

from hpctrain.commands.run import PROGRAM, with_program
from hpctrain.config.sections import Config
from hpctrain.errors import ExitCode, HpctrainError, RunFailed, UserError
from hpctrain.launch import sweep
from hpctrain.launch.engines import scheduler, schedulers, unread_keys
from hpctrain.launch.engines import status as run_status
from hpctrain.launch.engines.jobs import Plan, SubmitOptions, submissions
from hpctrain.run import bad_nodes, live_lock, resolve_run, stop_request
from hpctrain.run import logs as run_logs
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import UNKNOWN, Word
from hpctrain.run.run_view import RunView, run_config
from hpctrain.system import foreign_text
from hpctrain.system.foreign_text import answer
from hpctrain.system.json_shape import flat
from hpctrain.system.output import say
from hpctrain.system.quantities import positive

POLL_S = (0.5, 10.0)
"""First and longest pause between queries of the queue."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD")
"""States of jobs that have nothing to save."""
JOB_KEYS = ("launch.nodes", "launch.ranks_per_node", "launch.slurm.")
"""Keys that say what a job asks for, or how they begin."""
FOLLOW_S = 0.5
"""Seconds between two reads of a log that is followed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    name = parser.get_default("command")
    default = {"status": "; by default all your runs", "nodes": "; by default the list that all your runs share"}.get(
        name
    )
    target = f"run file or run folder{default or ''}"
    parser.add_argument("target", metavar="run", nargs="?" if default else None, help=target)
    parser.add_argument("--json", action="store_true", help="print JSON")
    if name in ("render", "submit", "resume"):
        parser.set_defaults(overrides=[])
    if name == "render":
        parser.add_argument("--portable", action="store_true", help="print one that takes any run file as its argument")
    if name in ("render", "submit"):
        parser.set_defaults(program=())
        parser.epilog = PROGRAM.format(command=name)
        parser.add_argument(
            "--array",
            action="append",
            default=[],
            metavar="SWEEP",
            help="a job array: KEY=V1,V2, or a file with one line of options per run",
        )
        parser.add_argument(
            "--at-once", type=positive, metavar="N", help="with --array: maximum number of runs at a time"
        )
    if name in ("submit", "resume"):
        parser.add_argument("--dry-run", action="store_true", help="print the script and what would be run")
        parser.add_argument(
            "--chain",
            type=positive,
            default=1,
            metavar="N",
            help="N jobs, one after the other, in place of one that is requeued",
        )
        parser.add_argument(
            "--exclude", action="append", default=[], metavar="HOST", help="keep this host out; may be repeated"
        )
        parser.add_argument(
            "--after",
            action="append",
            default=[],
            metavar="JOB",
            help="start when this job has succeeded; may be repeated",
        )
        parser.add_argument("--wait", action="store_true", help="return when the run has ended")
        parser.add_argument("--parsable", action="store_true", help="print only the job ID")
    if name == "nodes":
        parser.add_argument("--clear", metavar="NODE", help="take a node, or all, off the list")
    if name == "logs":
        parser.add_argument("--rank", help="a rank's number, or 'job' for the job's own log")
        parser.add_argument("--attempt", type=int, help="an earlier attempt's number")
        parser.add_argument("--follow", action="store_true", help="keep printing until the job ends")
        parser.add_argument("--first-error", action="store_true", help="only the log that shows the first error")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns an exit code."""
    functions = (render, submit, status, logs, stop, cancel, nodes)
    return ({each.__name__: each for each in functions} | {"resume": submit})[args.command](args)


def render(args: argparse.Namespace) -> int:
    """Prints the script; needs no scheduler."""
    args.overrides = with_program(args, args.target)
    config, folder = resolve_run.configured(args.target, args.overrides)
    options = SubmitOptions(portable=True) if args.portable else SubmitOptions(elements_of(args), args.at_once)
    has = schedulers.of(config)
    unread_keys.tell(config.launch, has.name)
    planned = has.plan(config, folder, options)
    answer(args.json, {"script": planned.script}, [planned.script.rstrip("\n")])
    return ExitCode.DONE


def submit(args: argparse.Namespace) -> int:
    """Writes the run folder and submits its script."""
    resumes = args.command == "resume"
    args.overrides = args.overrides if resumes else with_program(args, args.target)
    config, folder = resolve_run.configured(args.target, args.overrides)
    if resumes and not folder.run_yaml.exists():
        raise UserError(f"{folder.path} holds no run to resume", "start it with hpctrain submit")
    if resumes and resolve_run.elements_of(folder):
        raise UserError(f"{folder.path} is an array of runs", f"resume one of them: hpctrain resume {args.target}/0")
    if resumes:
        tell_changes(args.target, config, folder)
        config = schedulers.as_submitted(config, folder)
    elements = [] if resumes else elements_of(args)
    at_once = None if resumes else args.at_once
    options = SubmitOptions(elements, at_once, args.chain, args.after, args.exclude, resumes=resumes)
    return send(args, config, folder, options, refuses_finished=resumes and not args.overrides)


def tell_changes(target: str, config: Config, folder: RunDir) -> None:
    """Says in what a run file asks for another job than the run had: perhaps it was submitted with options."""
    if Path(target).is_dir():
        return
    try:
        had, _ = resolve_run.configured(str(folder.path))
    except UserError:  # of an older version, or damaged: the new run file replaces it
        return
    before, now = (flat(dataclasses.asdict(one)) for one in (had, config))
    asked = [key for key in before if key.startswith(JOB_KEYS)]
    changed = [f"{key} is {now[key]} (was {before[key]})" for key in asked if now.get(key) != before[key]]
    if changed:
        say(f"{', '.join(changed)}; hpctrain resume {folder.path} keeps what the run had")


def elements_of(args: argparse.Namespace) -> list[Config]:
    """Returns the runs of ``--array``; none without it."""
    target, words = Path(args.target), list(args.overrides)
    if args.array and target.is_dir():  # it may have been moved
        words += ["--run_dir", str(resolve_run.configured(args.target, args.overrides)[1].path)]
        target = RunDir(target).run_yaml
    return sweep.elements(str(target), words, args.array)


def send(
    args: argparse.Namespace, config: Config, folder: RunDir, options: SubmitOptions, refuses_finished: bool = False
) -> int:
    """Submits a run, or shows what would be submitted."""
    has = schedulers.of(config)
    unread_keys.tell(config.launch, has.name)
    planned = has.plan(config, folder, options)
    if refuses_finished:
        refuse_finished(planned)
    if args.dry_run:
        command = shlex.join(has.command(planned))
        said = {"script": planned.script, "command": command, "chain": args.chain}
        answer(args.json, said, [planned.script, f"# would run: {command}"])
        return ExitCode.DONE
    ids, notes = has.submit(planned)
    said = {"jobs": ids, "run_dir": str(folder.path), "script": str(planned.script_file)}
    text = [f"submitted job {', '.join(ids)}: {_shape(planned)}", f"  run folder {folder.path}"]
    answer(args.json, said, ids[-1:] if args.parsable else [*text, *(f"  {note}" for note in notes)])
    return _wait(folder) if args.wait else ExitCode.DONE


def refuse_finished(planned: Plan) -> None:
    """Refuses to resume a run that has nothing left to do.

    Raises:
        UserError: the run has finished, and no option asks for more than it did.
    """
    found = RunView(planned.run.path).snapshot()
    if found.outcome.word is Word.FINISHED:
        reason = (found.newest.verdict.reason if found.newest and found.newest.verdict else "") or found.outcome.value
        fix = "nothing to do; to train further, say how far: hpctrain resume ... --train.epochs N"
        raise UserError(f"{planned.run.path} has finished: {reason}", fix)


def _shape(planned: Plan) -> str:
    nodes = planned.config.launch.nodes
    shape = f"{planned.config.name} on {nodes} node" + ("s" if nodes > 1 else "")
    return f"{len(planned.elements)} runs of {shape}" if planned.elements else shape


def _wait(folder: RunDir) -> int:
    """Waits until no job of the run is queued or running; returns DONE only if all parts of the last one completed.

    If the queue has already forgotten a job, the run folder says how it ended.
    """
    pause, longest = POLL_S
    while schedulers.goes_on(folder):
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
    last = submissions(folder)[-1].job
    elements = [job for job in map(last_worked, resolve_run.elements_of(folder)) if job.startswith(f"{last}_")]
    jobs = elements or [last_worked(folder)]
    known = schedulers.of_run(folder).states([[job] for job in jobs], scheduler.TIMEOUT_S, ended=True)
    ended = [known[job].state if job in known else "" for job in jobs]
    if not elements and ended[0] in ("", UNKNOWN):
        found = RunView(folder.path).snapshot()
        done = found.newest and found.newest.job_id == jobs[0] and found.outcome.word is Word.FINISHED
        return ExitCode.DONE if done else ExitCode.FAILURE
    return ExitCode.DONE if all(state == "COMPLETED" for state in ended) else ExitCode.FAILURE


def last_worked(run: RunDir) -> str:
    """Returns the job that ran last among those submitted last: in a chain, jobs after the run's end never run."""
    jobs = submissions(run)
    begin = max((index for index, each in enumerate(jobs) if each.chain == 0 and each.replaces is None), default=0)
    ours = [each.job for each in jobs[begin:]]
    return next((a.job for a in reversed(Attempts(run).all()) if a.job in ours), ours[-1] if ours else "")


def stop(args: argparse.Namespace) -> int:
    """Asks a running job, or a run without a job, to save and stop; jobs with nothing to save are cancelled.

    A new attempt forgets older requests, so a running job that does not yet hold the run folder would not see ours.
    """
    holders = {run: live_lock.at_work(run) for run in runs_of(args.target)}
    for run in (run for run, holder in holders.items() if holder is not None):
        request_stop(run)  # needs no scheduler, and the holder may be in an allocation that is not a job of the run
    asked = [run for run, holder in holders.items() if holder is None or holder.job is not None]
    silence = ""
    try:
        entries = dict(zip(asked, schedulers.alive(asked), strict=True))
    except RunFailed as error:
        if None in holders.values():
            raise
        entries = {}
        silence = f"; jobs that wait are not cancelled: {error.what}"
    alive = {run: [each.id for each in entries.get(run, ())] for run in holders}
    idle = {
        run: [each.id for each in entries.get(run, ()) if each.state in WAITING or holder is None]
        for run, holder in holders.items()
    }
    has = schedulers.of_run(next(iter(holders)))
    ended, text = has.end(list(idle.items())) if any(idle.values()) else ([], [])
    said = []
    for run, holder in holders.items():
        running = [job for job in alive[run] if job not in idle[run]]
        waiting = [job for job in idle[run] if job in ended]
        is_command = bool((run_config(run.run_yaml).get("launch") or {}).get("command"))
        if waiting:
            saves = "whose ranks save first if they run" if has.ends_gently else "which has nothing to save"
            saves = "which hpctrain cannot save" if has.ends_gently and is_command else saves
            text.append(f"{run.path}: cancelled job {', '.join(waiting)}, {saves}")
        if holder is not None:
            who = f"job {', '.join(running)}" if running else "the run"
            what = "stop; what it has not saved itself is lost" if is_command else "save a checkpoint and stop"
            text.append(f"{run.path}: asked {who} to {what}{silence}")
        said.append({"run": str(run.path), "asked": running, "cancelled": waiting})
    answer(args.json, said, text or ["no job runs or waits"])
    return ExitCode.DONE


def runs_of(target: str) -> list[RunDir]:
    """Returns the run, the elements of an array, or a run whose folder was deleted although it has a job.

    Raises:
        UserError: there is none of them.
    """
    try:
        return resolve_run.runs(target)
    except UserError:
        gone = resolve_run.folder(target) if Path(target).exists() else RunDir(Path(target).absolute())
        with contextlib.suppress(HpctrainError):
            if schedulers.alive([gone])[0]:
                return [gone]
        raise


def request_stop(run: RunDir) -> None:
    """Creates the STOP file.

    Raises:
        UserError: the run folder cannot be written.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        user = str(os.geteuid())
    try:
        stop_request.request_stop(run, stop_request.StopRequest(f"{user}@{socket.gethostname()}"))
    except RunFailed as error:
        fix = "ask the run's owner, or hpctrain cancel ends its job"
        raise UserError(f"{run.stop_file} cannot be made: {error.what}", fix) from error


def cancel(args: argparse.Namespace) -> int:
    """Ends the run's jobs now; saved checkpoints stay."""
    runs = runs_of(args.target)
    alive = zip(runs, schedulers.alive(runs), strict=True)
    ids, left = schedulers.of_run(runs[0]).end([(run, [entry.id for entry in entries]) for run, entries in alive])
    said = {"cancelled": ids, "left_alone": left}
    answer(args.json, said, [f"cancelled job {', '.join(ids)}"] * bool(ids) + left or ["no job runs or waits"])
    return ExitCode.DONE


def status(args: argparse.Namespace) -> int:
    """Prints the state of the run, of each element of an array, or of all the user's runs; also without Slurm."""
    runs = runs_of(args.target) if args.target else run_status.own_runs(Path.cwd())
    found = run_status.of_runs(runs)
    text = run_status.lines(found) if args.target else run_status.table(found)
    answer(args.json, [each.plain() for each in found], text or ["no runs here (runs/), and none in Slurm's queue"])
    return ExitCode.DONE


def logs(args: argparse.Namespace) -> int:
    """Prints logs of ranks."""
    run = resolve_run.folder(args.target)
    found = run_logs.find(run, args.rank, args.attempt)
    if args.first_error:
        error = run_logs.first_error(run, found)
        said = {"file": str(error[0].path), "rank": error[0].rank, "text": error[1]} if error else {}
        answer(args.json, said, [f"==> {error[0].path} <==", error[1]] if error else ["no error in these logs"])
        return ExitCode.DONE
    if not found:
        there = ", ".join(dict.fromkeys(log.rank for log in run_logs.find(run)))
        fix = f"its last attempt has logs of {there}" if there else "hpctrain status shows whether the job has started"
        raise UserError(f"{run.logs} holds no such log", fix)
    if args.follow:
        # Rank 0 prints to the job's log.
        wanted = found[0] if args.rank else next((log for log in found if log.rank == "job"), found[0])
        for text in run_logs.follow(wanted.path, lambda: is_over(run), FOLLOW_S):
            foreign_text.show(text, end="")
        return ExitCode.DONE
    pairs = list(zip(found, run_logs.places(run, found), strict=True))
    data = [
        {"file": str(log.path), "rank": log.rank, "attempt": log.attempt, "place": place.strip(" ()") or None}
        for log, place in pairs
    ]
    answer(args.json, data, ())
    for log, place in pairs if not args.json else ():  # one at a time: thousands of logs may not fit into memory
        text = run_logs.read(log.path)
        foreign_text.show(f"==> {log.path}{place} <==\n{text}" if text else f"==> {log.path}{place} <== is empty")
    return ExitCode.DONE


def is_over(run: RunDir) -> bool:
    """Whether no process works on the run and none of its jobs is queued."""
    return live_lock.at_work(run) is None and not schedulers.goes_on(run)


def nodes(args: argparse.Namespace) -> int:
    """Lists the nodes that are excluded, and why, or clears some of them."""
    listed = bad_nodes.of_run(resolve_run.configured(args.target, [])[1]) if args.target else bad_nodes.shared()
    now = time.time()
    if args.clear:
        entries = listed.clear(args.clear, now)
        if not entries and args.clear != "all":
            raise UserError(f"{args.clear} is not excluded", "hpctrain nodes lists those that are")
    else:
        entries = listed.entries(now)
    how = "cleared, was to be excluded" if args.clear else "excluded"
    text = [f"{each.node}: {how} {bad_nodes.left(each, now)}: {each.reason}" for each in entries]
    answer(args.json, [dataclasses.asdict(each) for each in entries], text or ["no node is excluded"])
    return ExitCode.DONE
