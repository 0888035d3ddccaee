"""``hpctrain track sync|register|card``: what is sent or written about a run after it has ended."""

from __future__ import annotations

import argparse
import importlib

from hpctrain.config.values import refuse_credentials
from hpctrain.errors import ExitCode, RunFailed, UserError, requires
from hpctrain.run.folder import RunDir
from hpctrain.system import foreign_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    sync = commands.add_parser("sync", help="send MLflow and Weights & Biases what they missed while they were down")
    register = commands.add_parser("register", help="register a checkpoint's model in MLflow, with its provenance")
    card = commands.add_parser("card", help="print a model card in Markdown")
    for each in (sync, register, card):
        each.add_argument("run", help="run folder or run file")
    for each in (sync, register):
        each.add_argument("--uri", help="tracking server or folder; by default the run file's track.mlflow")
    for each in (register, card):
        each.add_argument("--step", type=int, help="checkpoint; by default the newest intact one")
    register.add_argument("--name", help="name in the model registry; by default the run's")
    register.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns an exit code."""
    refuse_credentials(getattr(args, "uri", None), "--uri")
    return {"sync": sync, "register": register, "card": card}[args.action](args)


def sync(args: argparse.Namespace) -> int:
    """Sends all events that have not been sent."""
    from hpctrain.commands.report import find_run
    from hpctrain.config.sections import TrackConfig
    from hpctrain.track.follower import follow
    from hpctrain.track.sinks import TRACKERS

    view = find_run(args.run)
    track = view.look(within_s=0.0).config.get("track") or {}
    given = {key: track.get(key) for key in TRACKERS} | ({"mlflow": args.uri} if args.uri else {})
    if not any(given.values()):
        raise UserError(f"{view.path} was not tracked with MLflow", "name a server or folder with --uri")
    for key, uri in given.items():
        if not uri:
            continue
        title, more = TRACKERS[key].title, TRACKERS[key].more
        with requires(key, key):
            make = importlib.import_module(f"hpctrain.track.{key}").make
            follower = make(RunDir(view.path), uri, track.get(more) or getattr(TrackConfig(), more, ""))
        if not follow(follower, lambda seconds: True):
            fix = "start the server, then try again"
            raise RunFailed(f"{title} at {uri} does not accept the metrics: {follower.problem}", fix)
        foreign_text.show(f"{title} run {follower.run_id} at {uri} is complete")
    return ExitCode.DONE


def register(args: argparse.Namespace) -> int:
    """Registers the model of a checkpoint."""
    from hpctrain.commands.report import find_run
    from hpctrain.registry.register import register_model

    registered = register_model(RunDir(find_run(args.run).path), args.step, args.uri, args.name)
    plain = f"model {registered['name']} version {registered['version']}: {registered['uri']}"
    foreign_text.answer(args.json, registered, [plain])
    return ExitCode.DONE


def card(args: argparse.Namespace) -> int:
    """Prints a model card."""
    from hpctrain.commands.report import find_run
    from hpctrain.registry.register import model_card

    foreign_text.show(model_card(find_run(args.run).history(), args.step), end="")
    return ExitCode.DONE
