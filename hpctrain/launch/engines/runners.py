"""Starts ranks with one mpirun on nodes that have connected to the supervisor by `hpctrain node`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines import hosts
from hpctrain.launch.engines.local import RunRequest
from hpctrain.launch.runners import ask, desk, runner, ticket
from hpctrain.run.verdict import RunVerdict
from hpctrain.system import python
from hpctrain.system.output import say
from hpctrain.system.processes import own_folder
from hpctrain.system.signals import Interrupted, interruptible

Invite = Callable[[Config, ticket.Ticket], contextlib.AbstractContextManager[Callable[[], str]]]
"""Starts ``hpctrain node`` with a ticket on each node of a run, as a context that ends after the run. It yields a
function that says why missing nodes will not come, or returns an empty text."""


def serve(given: ticket.Ticket) -> int:
    """Runs `hpctrain node` on this machine until the run is over; returns its exit code.

    Called in a process of the engine. The node outlives that process and ends only with its supervisor, since engines
    end their processes on all nodes when one node is lost.
    """
    environment = python.environment() | given.variables
    return subprocess.run(python.module("hpctrain", "node"), env=environment, start_new_session=True).returncode


def run(asked: RunRequest, invite: Invite | None) -> RunVerdict:
    """Waits for nodes, started by ``invite`` or otherwise by the user, and trains on them; see ``run_on``.

    Raises:
        UserError: nodes cannot find this supervisor, or another live run uses the ticket's file.
    """
    if invite:
        return run_on(invite, ticket.fresh(), asked)
    launch = asked.config.launch
    given, path = ticket.of_environment(os.environ), launch.ticket
    if given is None and path is None:
        what = "launch.engine is runners, and nodes cannot find this supervisor"
        raise UserError(what, f"set launch.ticket to a file that all nodes see, or {ticket.KEY} and {ticket.ADDRESS}")
    for name in (ticket.KEY, ticket.ADDRESS):  # ranks must not have them
        os.environ.pop(name, None)
    say(f"waiting for {launch.nodes + launch.spare_nodes} nodes: hpctrain node {path or ''}".rstrip())

    @contextlib.contextmanager
    def shown(_: Config, made: ticket.Ticket) -> Iterator[Callable[[], str]]:
        with contextlib.ExitStack() as stack:
            if given is None and path is not None:
                made.write(Path(path), runner.lives)
                stack.callback(made.remove, Path(path))
            yield str

    return run_on(shown, given or ticket.fresh(), asked)


def run_on(invite: Invite, given: ticket.Ticket, asked: RunRequest) -> RunVerdict:
    """Trains on nodes that ``invite`` starts; see ``hosts.run``.

    Args:
        invite: see ``Invite``.
        given: the ticket; port 0 for any free port.
        asked: the run.

    Raises:
        UserError: as in ``hosts.run``.
        RunFailed: nodes do not connect, or a signal ended the wait for them.
    """
    config, launch = asked.config, asked.config.launch
    with own_folder(tempfile.gettempdir()) as folder:
        if not folder:
            raise RunFailed(f"{tempfile.gettempdir()} cannot be written", "set TMPDIR to a folder of this machine")
        with contextlib.ExitStack() as nodes, desk.opened(given, Path(folder)) as opened:
            made = dataclasses.replace(given, port=opened.port)
            problem = nodes.enter_context(invite(config, made))  # nodes leave when the desk closes, before this exits
            count = launch.nodes + launch.spare_nodes
            try:
                with interruptible():
                    names = opened.wait_for(count, launch.node_wait_s, problem)
            except Interrupted as error:
                what = f"stopped by signal {error} while it waited for nodes"
                raise RunFailed(what, "the same command starts it") from error
            shell = shlex.join([sys.executable, "-I", "-S", ask.__file__, str(opened.path), "{host}"])
            on_nodes = dataclasses.replace(launch, engine=None, hosts=tuple(names[:count]), remote_shell=shell)
            found = [opened.nodes[name] for name in names[:count]]
            say("; ".join("{host}: {cores} cores, {gpus} GPUs".format(**each) for each in found))
            cores = min(each["cores"] for each in found)
            asked = dataclasses.replace(asked, config=dataclasses.replace(config, launch=on_nodes))
            return hosts.run(asked, cores, away=lambda: opened.lost)
