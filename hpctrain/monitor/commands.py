"""``hpctrain watch``: the live view of a run."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from hpctrain.errors import ExitCode, UserError

REFRESH_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``watch``."""
    parser.add_argument("run", help="run file or run folder")
    parser.add_argument("--once", action="store_true", help="print the view once")
    parser.add_argument("--json", action="store_true", help="print the view once, as JSON")


def run(args: argparse.Namespace) -> int:
    """Shows the view until interrupted, or once."""
    from hpctrain.monitor import watch

    folder = monitor_folder(args.run)
    view = watch.read(folder)
    if args.json or args.once:
        if view is None:
            raise UserError(f"{folder} has no live view", "wait for the first windows; monitor.enabled must be true")
        print(json.dumps(view) if args.json else watch.render(view, time.time(), shutil.get_terminal_size().columns))
        return ExitCode.DONE
    try:
        while True:
            size = shutil.get_terminal_size()
            text = f"waiting for the first windows in {folder}"
            if (view := watch.read(folder)) is not None:
                text = watch.render(view, time.time(), size.columns, most=max(4, size.lines - 8))
            sys.stdout.write(f"\x1b[H\x1b[2J{text}\n")
            sys.stdout.flush()
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        return ExitCode.DONE


def monitor_folder(run: str) -> Path:
    """The monitor's folder of a run file or run folder.

    Raises:
        UserError: there is neither.
    """
    from hpctrain.run_dir import RunDir

    path = Path(run)
    if path.is_dir():
        return RunDir(path).monitor
    if path.is_file():
        from hpctrain.config_file import load

        return RunDir.for_config(load(run)).monitor
    raise UserError(f"{run} is neither a run file nor a run folder", "name runs/<name> or the YAML file of the run")
