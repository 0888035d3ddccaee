"""``hpctrain track sync``: what is sent about a run after it has ended."""

from __future__ import annotations

import argparse
import importlib

from hpctrain.config.values import refuse_credentials
from hpctrain.errors import ExitCode, RunFailed, UserError, requires
from hpctrain.run.folder import RunDir
from hpctrain.system import foreign_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "send MLflow and Weights & Biases what they missed while they were down"
    sync = commands.add_parser("sync", help=text, description=text)
    sync.add_argument("run", help="run folder or run file")
    sync.add_argument("--uri", help="tracking server or folder; by default the run file's track.mlflow")


def run(args: argparse.Namespace) -> int:
    """Sends all events that have not been sent."""
    refuse_credentials(args.uri, "--uri")
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
