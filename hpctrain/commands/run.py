"""``hpctrain run`` and ``hpctrain supervise``."""

from __future__ import annotations

import argparse
import json

from hpctrain.errors import ExitCode, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See api of commands in ``cli``; ``args.command`` says which of the two is meant."""
    from hpctrain.config.loading import add_run_file

    if parser.get_default("command") == "run":
        default = "by default launch.ranks_per_node, else 1"
        parser.add_argument("-n", "--ranks", type=int, default=None, help=f"ranks to start; {default}")
        parser.add_argument("--fresh", action="store_true", help="put aside what is there and begin again")
        parser.add_argument("--doctor", action="store_true", help="examine MPI between the ranks instead of training")
        parser.set_defaults(program=())
        parser.epilog = "hpctrain run -n 4 --name NAME -- PROGRAM ...: any program, without a run file"
        parser.add_argument("--json", action="store_true", help="with --doctor: JSON")
    add_run_file(parser)
    next(action for action in parser._actions if action.dest == "run_file").nargs = "?"  # --doctor needs none
    parser.add_argument("--verbose", action="store_true", help="show what libraries and launchers say")


def run(args: argparse.Namespace) -> int:
    """Runs one of the two; an ExitCode."""
    if args.command == "run" and args.doctor:
        from hpctrain.commands.doctor import on_ranks

        return on_ranks(args.ranks or 2, args.json)
    if args.run_file is None and not args.program:
        raise UserError(f"hpctrain {args.command}: no run file given", f"hpctrain {args.command} run.yaml")
    if args.command == "supervise":
        from hpctrain.launch.engines.slurm.supervise import supervise_job

        return int(supervise_job(args.run_file, args.overrides, args.verbose))
    return run_locally(args)


def run_locally(args: argparse.Namespace) -> int:
    """Ranks on this machine."""
    from hpctrain.config.loading import load
    from hpctrain.launch.engines import local
    from hpctrain.launch.supervisor import report
    from hpctrain.run.folder import RunDir

    program = ["--launch.command", json.dumps(args.program)] if args.program else []
    config = load(args.run_file or None, [*args.overrides, *program])
    ranks = config.launch.ranks_per_node or 1 if args.ranks is None else args.ranks
    if ranks < 1:
        raise UserError(f"-n {ranks}", "start 1 rank or more")
    flags = [f"--{name}" for name in ("verbose", "fresh") if getattr(args, name)]
    verdict = local.run(config, ranks, ["train", str(args.run_file), *args.overrides, *flags], args.verbose)
    report(verdict, RunDir.for_config(config))
    return ExitCode(verdict.exit_code)
