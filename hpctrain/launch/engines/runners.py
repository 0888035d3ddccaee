"""Starts ranks with one mpirun on nodes that have connected to the supervisor by `hpctrain node`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import tempfile
from pathlib import Path

from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines import hosts
from hpctrain.launch.engines.local import RunRequest
from hpctrain.launch.runners import ask, desk, runner, ticket
from hpctrain.run.verdict import RunVerdict
from hpctrain.system.output import say
from hpctrain.system.processes import own_folder
from hpctrain.system.signals import Interrupted, interruptible


def run(asked: RunRequest) -> RunVerdict:
    """Waits for nodes on which the user starts `hpctrain node`, and trains on them; see ``hosts.run``.

    Raises:
        UserError: nodes cannot find this supervisor, another live run uses the ticket's file, or as in ``hosts.run``.
        RunFailed: nodes do not connect, or a signal ended the wait for them.
    """
    launch = asked.config.launch
    given, path = ticket.of_environment(os.environ), launch.ticket
    if given is None and path is None:
        what = "launch.engine is runners, and nodes cannot find this supervisor"
        raise UserError(what, f"set launch.ticket to a file that all nodes see, or {ticket.KEY} and {ticket.ADDRESS}")
    for name in (ticket.KEY, ticket.ADDRESS):  # ranks must not have them
        os.environ.pop(name, None)
    say(f"waiting for {launch.nodes + launch.spare_nodes} nodes: hpctrain node {path or ''}".rstrip())
    with own_folder(tempfile.gettempdir()) as folder:
        if not folder:
            raise RunFailed(f"{tempfile.gettempdir()} cannot be written", "set TMPDIR to a folder of this machine")
        shown = given or ticket.fresh()
        with contextlib.ExitStack() as stack, desk.opened(shown, Path(folder)) as opened:
            if given is None and path is not None:
                made = dataclasses.replace(shown, port=opened.port)
                made.write(Path(path), runner.lives)
                stack.callback(made.remove, Path(path))
            return _run_on_nodes(asked, opened)


def _run_on_nodes(asked: RunRequest, opened: desk.Desk) -> RunVerdict:
    """Waits until enough nodes have connected, and trains on them."""
    launch = asked.config.launch
    count = launch.nodes + launch.spare_nodes
    try:
        with interruptible():
            names = opened.wait_for(count, launch.node_wait_s)
    except Interrupted as error:
        what = f"stopped by signal {error} while it waited for nodes"
        raise RunFailed(what, "the same command starts it") from error
    found = [opened.nodes[name] for name in names[:count]]
    say("; ".join("{host}: {cores} cores, {gpus} GPUs".format(**each) for each in found))
    shell = shlex.join([sys.executable, "-I", "-S", ask.__file__, str(opened.path), "{host}"])
    launch = dataclasses.replace(launch, engine=None, hosts=tuple(names[:count]), remote_shell=shell)
    asked = dataclasses.replace(asked, config=dataclasses.replace(asked.config, launch=launch))
    return hosts.run(asked, min(each["cores"] for each in found), away=lambda: opened.lost)
