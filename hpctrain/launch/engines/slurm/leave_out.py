"""Nodes that the run's next job does without."""

from __future__ import annotations

import time

from hpctrain.config.sections import Config
from hpctrain.errors import HpctrainError
from hpctrain.run import bad_nodes, last_words
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.system.output import say


def avoided(config: Config, run: RunDir) -> list[str]:
    """Slurm's names of nodes that are on the run's list, or on that of all runs of this user."""
    found = [entry.node for nodes in _lists(config, run) for entry in nodes.entries(time.time())]
    return list(dict.fromkeys(found))


def option(config: Config, run: RunDir) -> list[str]:
    """The option of sbatch, none if no node is left out. It replaces that of the script, and holds its hosts too."""
    nodes = avoided(config, run)
    return [f"--exclude={','.join([*config.launch.slurm.exclude, *nodes])}"] if nodes else []


def note_culprit(config: Config, run: RunDir) -> None:
    """Puts the node that alone broke the last two attempts on the list, and shares what the monitor has put there."""
    attempts = Attempts(run).all()
    if not attempts or config.launch.slurm.bad_nodes == "off":
        return
    number = attempts[-1].number
    words = last_words.read(run, number)
    host = bad_nodes.breaks_again(attempts, words.ranks if words else [])
    if host is not None and attempts[-1].verdict is not None:
        note(config, run, host, f"it alone broke two attempts in a row: {attempts[-1].verdict.reason}", number)
    if config.launch.slurm.bad_nodes == "shared":
        found = [entry for entry in bad_nodes.of_run(run).entries(time.time()) if entry.attempt == number]
        _add(bad_nodes.shared(), *found)


def note(config: Config, run: RunDir, host: str, reason: str, attempt: int) -> None:
    """Puts a node on the run's list; what cannot be written is reported, and changes nothing else."""
    hours = config.monitor.exclude_hours
    entry = bad_nodes.BadNode(host, time.time() + 3600 * hours, attempt, reason, str(run.path))
    if config.launch.slurm.bad_nodes != "off" and _add(bad_nodes.of_run(run), entry):
        say(f"{entry.node} is left out at the next start, for {hours:g} h: {reason} (hpctrain nodes shows and clears)")


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
