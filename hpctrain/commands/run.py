"""``hpctrain run``, ``supervise`` and ``node``: what starts ranks and serves a run on its nodes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.config.loading import add_run_file, load
from hpctrain.errors import ExitCode, UserError
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import JOB
from hpctrain.run.verdict import Action, RunVerdict
from hpctrain.system.output import say

if TYPE_CHECKING:
    from hpctrain.launch.engines.local import RunRequest

PROGRAM = "hpctrain {command} -- PROGRAM ...: any program, without a run file; --name NAME names the run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the parser's command; see ``cli``."""
    if parser.get_default("command") == "node":
        parser.add_argument(
            "ticket", type=Path, nargs="?", help="launch.ticket of the run; by default HPCTRAIN_NODE_KEY is used"
        )
        parser.add_argument(
            "--wait", type=float, default=600.0, metavar="S", help="longest wait for the run, in seconds (default 600)"
        )
        parser.epilog = "Start it on each node of a run with launch.engine: runners; it ends with the run."
        return
    if parser.get_default("command") == "run":
        default = "by default launch.ranks_per_node, else the tasks of a Slurm job, else 1"
        parser.add_argument("-n", "--ranks", type=rank_count, default=None, help=f"ranks to start; {default}")
        parser.add_argument("--fresh", action="store_true", help="put existing checkpoints aside and start over")
        parser.add_argument("--doctor", action="store_true", help="test MPI between the ranks instead of training")
        parser.set_defaults(program=())
        parser.epilog = PROGRAM.format(command="run -n 4")
        parser.add_argument("--json", action="store_true", help="with --doctor: JSON")
    add_run_file(parser, nargs="?")  # --doctor needs none
    parser.add_argument("--verbose", action="store_true", help="also show the output of libraries and launchers")


def run(args: argparse.Namespace) -> int:
    """Runs one of the three; returns an ExitCode."""
    if args.command == "node":
        return serve(args)
    if args.command == "run" and args.doctor:
        from hpctrain.commands.doctor import on_ranks

        return on_ranks(args.ranks or 2, args.json)
    if args.run_file is None and not args.program:
        raise UserError(f"{args.command}: no run file given", f"hpctrain {args.command} run.yaml")
    if args.command == "supervise":
        from hpctrain.launch.engines.slurm.supervise import supervise_job

        return int(supervise_job(args.run_file, args.overrides, args.verbose))
    return run_here(args)


def serve(args: argparse.Namespace) -> int:
    """Serves one run on this node."""
    from hpctrain.launch.runners import runner, ticket

    given = ticket.of_environment(os.environ)
    if given is None and args.ticket is None:
        raise UserError("node: no ticket given", f"name the file of launch.ticket, or set {ticket.KEY}")
    runner.run(lambda: given or ticket.read(args.ticket), args.wait)
    return ExitCode.DONE


def run_here(args: argparse.Namespace) -> int:
    """Runs ranks on this machine, or on those that the run file names."""
    from hpctrain.launch.engines.local import RunRequest
    from hpctrain.launch.supervisor import report

    if args.run_file and (inside := RunDir(Path(args.run_file)).run_yaml).is_file():
        what = f"{args.run_file} is a run folder, and run takes a run file"
        raise UserError(what, f"write {inside} --run_dir {args.run_file}")
    config = load(args.run_file or None, with_program(args, args.run_file), say)
    words = [str(args.run_file)] if args.run_file else []
    words += args.overrides
    if args.verbose:
        words.append("--verbose")
    verdict, option = start(RunRequest(config, args.ranks, ["train", *words], args.verbose, args.fresh))
    command = ["hpctrain", "run", *option, *words]
    if args.program:
        command += ["--", *args.program]
    report(verdict, RunDir.of(config.name, config.run_dir), command, saves=not config.launch.command)
    if verdict.action is Action.STOP and JOB in os.environ:  # the job must not start again
        return ExitCode.DO_NOT_REQUEUE
    return ExitCode(verdict.exit_code)


def start(asked: RunRequest) -> tuple[RunVerdict, list[str]]:
    """Starts ranks here or on ``launch.hosts``; returns the verdict, and the ``-n`` option for another start.

    Raises:
        UserError: fewer than one rank is asked for, or what the engines raise.
    """
    from hpctrain.launch.engines import batch_systems, hosts, local, runners, unread_keys
    from hpctrain.launch.engines.slurm import job
    from hpctrain.launch.nested_launcher import refuse_launcher

    if asked.ranks is not None and asked.ranks < 1:
        raise UserError(f"-n {asked.ranks}", "start 1 rank or more")
    launch = asked.config.launch
    option = [] if asked.ranks is None else ["-n", str(asked.ranks)]
    if engine := launch.engine or ("hosts" if launch.hosts else None):
        unread_keys.tell(launch, engine)
    if launch.engine == "runners":
        return runners.run(asked), option
    if launch.engine == "slurm":
        raise UserError("launch.engine is slurm: its jobs run it", "hpctrain submit starts one")
    launch = batch_systems.on_hosts_of_the_job(launch, os.environ)
    asked = dataclasses.replace(asked, config=dataclasses.replace(asked.config, launch=launch))
    here = 1 if launch.hosts else job.ranks_here()
    ranks = asked.ranks or (launch.ranks_per_node or here) * max(len(launch.hosts), 1)
    refuse_launcher(launch.command, ranks)
    if launch.hosts:
        return hosts.run(asked), option
    return local.run(dataclasses.replace(asked, ranks=ranks)), ["-n", str(ranks)]


def rank_count(word: str) -> int:
    """Converts the word after -n. Raises UserError for mpirun's spelling."""
    if word == "p":
        raise UserError("run has no -np", "write -n, as in hpctrain run -n 2 run.yaml")
    return int(word)


def with_program(args: argparse.Namespace, run_file: str | None) -> list[str]:
    """Returns the command line's keys, with those of a program that follows two dashes."""
    if not args.program:
        return list(args.overrides)
    name = [] if run_file else ["--name", name_of(args.program)]
    return [*name, *args.overrides, "--launch.command", json.dumps(args.program)]


def name_of(program: Sequence[str]) -> str:
    """Names the run of a program: after its Python file or module, else after the program itself."""
    words = list(program)
    if re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        given = next((word for word in words[1:] if word.endswith(".py")), "")
        if "-m" in words[1:-1]:
            given = words[words.index("-m") + 1].removesuffix(".__main__").rpartition(".")[2]
        words[0] = given or words[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(words[0]).name.removesuffix(".py")).strip("._-")
    return name[:100] or "program"
