"""Nodes to leave out of the run's next job or attempt."""

from __future__ import annotations

import dataclasses
import time

from hpctrain.config.sections import Config
from hpctrain.errors import HpctrainError
from hpctrain.run import bad_nodes, last_words
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.system.output import say


def avoided(config: Config, run: RunDir) -> list[str]:
    """Returns Slurm's names of the nodes on the run's list, and on the list shared by the user's runs if it is used."""
    found = [entry.node for nodes in _lists(config, run) for entry in nodes.entries(time.time())]
    return list(dict.fromkeys(found))


def option(config: Config, run: RunDir) -> list[str]:
    """Returns sbatch's --exclude option, or none. It overrides the script's own, so it includes those hosts too."""
    nodes = avoided(config, run)
    return [f"--exclude={','.join([*config.launch.slurm.exclude, *nodes])}"] if nodes else []


def note_culprit(config: Config, run: RunDir) -> None:
    """Lists the node that alone broke the last two attempts, if any; copies new entries to the shared list if used."""
    attempts = Attempts(run).all()
    if not attempts or config.launch.slurm.bad_nodes == "off":
        return
    number = attempts[-1].number
    words = last_words.read(run, number)
    host = bad_nodes.breaks_again(attempts, words.ranks if words else [])
    if (innocent := bad_nodes.acquitted(attempts)) is not None:  # the failure follows the rank
        for nodes in _lists(config, run):
            ours = [each for each in nodes.entries(time.time()) if (each.host, each.run) == (innocent, str(run.path))]
            _add(nodes, *(dataclasses.replace(entry, until=0.0) for entry in ours))
    if host is not None and attempts[-1].verdict is not None:
        reason = attempts[-1].verdict.reason
        note(config, run, host, f"it is the only suspect in two failed attempts in a row: {reason}", number)
    if config.launch.slurm.bad_nodes == "shared":
        found = [entry for entry in bad_nodes.of_run(run).entries(time.time()) if entry.attempt == number]
        _add(bad_nodes.shared(), *found)


def note(config: Config, run: RunDir, host: str, reason: str, attempt: int) -> None:
    """Puts a node on the run's list; if that fails, only reports it."""
    hours = config.monitor.exclude_hours
    entry = bad_nodes.BadNode(host, bad_nodes.in_hours(hours), attempt, reason, str(run.path))
    if config.launch.slurm.bad_nodes != "off" and _add(bad_nodes.of_run(run), entry):
        say(f"{entry.node} is excluded at the next start, for {hours:g} h: {reason} (hpctrain nodes shows and clears)")


def _lists(config: Config, run: RunDir) -> list[bad_nodes.BadNodes]:
    own = bad_nodes.of_run(run)
    return [own, bad_nodes.shared()] if config.launch.slurm.bad_nodes == "shared" else [own]


def _add(nodes: bad_nodes.BadNodes, *entries: bad_nodes.BadNode) -> bool:
    try:
        if entries:
            nodes.add(*entries)
    except HpctrainError as error:
        say(str(error))
        return False
    return True
