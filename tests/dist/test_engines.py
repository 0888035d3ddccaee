"""Runs on the hosts of each engine: by ssh or `hpctrain node`, and on real Grid Engine and Slurm.

Ranks are killed, a host is lost, the run is stopped and resumed, and its weights match an undisturbed local run.
Programs written for other launchers print the same numbers as under those.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import collect
from tests.conftest import NOT_PERMITTED
from tests.slurm import cluster as slurm_cluster
from tests.support import foreign_programs as foreign
from tests.support import grid_engine, netns
from tests.support.command import PROJECT, endings, environment, events, gone, hpctrain, last_words, wait_for, write_run
from tests.support.mpi import LAUNCH_S, PATIENCE_S
from tests.support.warm_ranks import variables

PROGRAMS = Path(__file__).parent / "programs"
TASK = PROJECT / "tests" / "tasks" / "torch_waiting_task.py"
STEPS = 60

pytestmark = [pytest.mark.world_size(6)]


@dataclass(frozen=True)
class Place:
    """Three hosts of an engine, with what the tests need to start runs on them and to harm them."""

    hosts: Sequence[str]
    """Host names; supervisors are on the first."""
    launch: Mapping[str, Any]
    """Keys of ``launch``."""
    command: Callable[..., list[str]]
    """Makes a command that runs words where runs are started."""
    environment: Mapping[str, str]
    """Environment variables there."""
    kill: Callable[[str, int], object]
    """Kills a process on a host, given its pid there."""
    lose: Callable[[str], object]
    """Makes a host fail."""
    ranks: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of ranks that train."""
    queued: bool = False
    """Whether runs are submitted as jobs instead of with `hpctrain run`."""
    for_two: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``launch`` with which a run is resumed on two hosts."""

    @contextmanager
    def started(self, file: Path, resumes: bool = False) -> Iterator[subprocess.Popen[str]]:
        """Start a run, or resume one without a spare host; return the process that waits for its end."""
        options = {"spare_nodes": 0, **self.for_two} if resumes else {}
        words = ["resume" if resumes else "submit", file, "--wait"] if self.queued else ["run", file]
        for key, value in options.items():
            words += [f"--launch.{key}", json.dumps(value)]
        with process(self.command(sys.executable, "-m", "hpctrain", *words), self.environment) as child:
            yield child


@contextmanager
def process(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end."""
    child = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def on_network(network: netns.Network, launch: Mapping[str, Any], local: Mapping[str, str], **more: Any) -> Place:
    """A place on hosts with separate networks; ``local`` is the environment of whoever starts a run there."""
    return Place(
        network.names,
        launch,
        lambda *words: network.on(0, "exec", *words),
        environment(netns.INTERFACES | local),
        lambda host, pid: os.kill(pid, signal.SIGKILL),
        lambda host: netns._end_processes([host]),
        variables("torch", environment()),
        **more,
    )


def run_file(folder: Path, launch: Mapping[str, Any], gate: str = "", **keys: Any) -> Path:
    folder.mkdir(exist_ok=True)
    made = {
        "task": f"{TASK}:task",
        "run_dir": str(folder / "run"),
        "task_args": {"data": str(folder.parent / "digits"), "gate": gate},
        "train": {"steps": STEPS, "global_batch": 48, "threads": 1},
        "checkpoint": {"every_steps": 5},
        "reduce": {"kind": "mpi"},
        "monitor": {"enabled": False},
    }
    return write_run(folder, launch=launch, **made | keys)


def weights(run: Path, attempt: int) -> set[str]:
    return {word["weights_hash"] for word in last_words(run, attempt)}


def require(package: str) -> Path:
    """Folder of a package, without importing it; skips the test if it is missing."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(found.origin).parent


@contextmanager
def on_hosts(network: netns.Network) -> Iterator[None]:
    """A context that ends everything started on the hosts in it."""
    try:
        yield
    finally:
        netns._end_processes(network.names)


@contextmanager
def runners(network: netns.Network, folder: Path) -> Iterator[Place]:
    """A place with an `hpctrain node` on each host, started again after each run."""
    ticket = folder / "ticket"
    loop = f"while :; do {sys.executable} -m hpctrain node {ticket}; done"
    nodes = [
        subprocess.Popen(network.on(host, "sh", "-c", loop), env=environment(), stderr=subprocess.DEVNULL)
        for host in range(3)
    ]
    with on_hosts(network):
        yield on_network(network, {"ticket": str(ticket)}, {})
    for node in nodes:
        node.wait()


@contextmanager
def hosts(network: netns.Network, folder: Path) -> Iterator[Place]:
    """A place without an engine, reached by a remote shell."""
    shell = f"{network.folder}/agent {{host}}"
    launch = {"hosts": network.addresses, "remote_shell": shell}
    with on_hosts(network):
        yield on_network(network, launch, {}, for_two={"hosts": network.addresses[:2]})


@contextmanager
def gridengine(network: netns.Network, folder: Path) -> Iterator[Place]:
    """A Grid Engine with its master on the first host, which jobs prefer."""
    if grid_engine.missing():
        pytest.skip(f"{NOT_PERMITTED}Grid Engine is not installed (gridengine-master, -exec and -client)")
    with on_hosts(network):
        own = grid_engine.start(network, folder)
        of_all, for_two = ({"directives": [f"-pe mpi {hosts}"]} for hosts in (3, 2))
        yield on_network(network, of_all, own, queued=True, for_two=for_two)


@contextmanager
def slurm(network: netns.Network, folder: Path) -> Iterator[Place]:
    """A Slurm cluster, whose nodes share one network."""
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.two_nodes(folder) as cluster:
        cluster.start_node(slurm_cluster.THIRD)
        yield Place(
            (*slurm_cluster.NODES, slurm_cluster.THIRD),
            {"slurm": {"profile": "local-test", "partition": "three", "signal_s": 20}},
            lambda *words: [*map(str, words)],
            cluster.environment,
            lambda host, pid: cluster.in_node(host, "kill", "-KILL", str(pid)),
            cluster.kill_node,
            queued=True,
        )


ENGINES = {each.__name__: each for each in (hosts, runners, gridengine, slurm)}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[netns.Network]:
    """A network of three hosts for all tests in this file."""
    try:
        with netns.network(3, "1gbit", tmp_path_factory.mktemp("network")) as made:
            yield made
    except netns.NotPermitted as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=ENGINES)
def place(request: pytest.FixtureRequest, network: netns.Network, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The place of an engine; an engine's last test may leave it with fewer hosts."""
    with ENGINES[request.param](network, tmp_path_factory.mktemp(request.param)) as made:
        yield made


def launch_of(place: Place, request: pytest.FixtureRequest, spares: int) -> dict[str, Any]:
    """Keys of ``launch`` for two hosts plus spares."""
    launch = {"engine": request.node.callspec.params["place"], "nodes": 2, "spare_nodes": spares, "ranks_per_node": 1}
    launch |= place.launch
    if "hosts" in launch:
        launch["hosts"] = launch["hosts"][: 2 + spares]
    return launch


OF_ENGINES = {"hosts": ["multiworker"], "runners": ["ddp"]}
"""Programs that `make test-all` runs on each engine; `make torture` runs all of them."""
if foreign.ALL:
    OF_ENGINES = {name: ["ddp", "multiworker", "lightning", "accelerate"] for name in OF_ENGINES}


@pytest.fixture(scope="module")
def own_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Losses that a program prints under its own launcher."""

    @functools.cache
    def losses(name: str) -> list[str]:
        own = foreign.KINDS[name].under_its_own_launcher(tmp_path_factory.mktemp(name))
        assert len(foreign.losses(own.stdout)) == 5, own.output
        return foreign.losses(own.stdout)

    return losses


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", OF_ENGINES, indirect=True)
def test_programs_of_others_give_the_numbers_of_their_own_launchers_on_two_hosts(place, request, tmp_path, own_losses):
    for name in OF_ENGINES[request.node.callspec.params["place"]]:
        program, run = foreign.KINDS[name], tmp_path / name
        command = [sys.executable, *program.words(nodes=2)]
        launch = {**launch_of(place, request, 0), "command": command, "convention": program.convention}
        with place.started(write_run(tmp_path, run_dir=str(run), launch=launch)) as child:
            said, _ = child.communicate(timeout=LAUNCH_S)
        assert child.returncode == 0, said
        assert foreign.losses(said) == own_losses(name), said
        assert len({word["host"] for word in last_words(run)}) == 2


NOTIFIED = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["PMIX_RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
again = (folder / f"began-{rank}").exists()
(folder / f"began-{rank}").touch()
while not again:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("place", ["gridengine"], indirect=True)
def test_a_job_of_grid_engine_that_is_told_of_its_end_saves_and_runs_again(place, request, tmp_path):
    (tmp_path / "program.py").write_text(NOTIFIED)
    run, command = tmp_path / "run", [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    launch = {**launch_of(place, request, 0), **place.for_two, "command": command}
    with place.started(write_run(tmp_path, run_dir=str(run), launch=launch)) as child:
        wait_for("ranks", lambda: all((tmp_path / f"began-{rank}").exists() for rank in range(2)), LAUNCH_S)
        [shell] = Path(place.environment["SGE_ROOT"], "hosts").glob("*/active_jobs/*/job_pid")
        os.killpg(int(shell.read_text()), signal.SIGUSR2)  # sent by Grid Engine because of -notify
        text, _ = child.communicate(timeout=LAUNCH_S)
    logs = text + "".join(path.read_text() for path in run.glob("logs/*"))
    assert [endings(run, attempt) for attempt in (1, 2)] == [["stop_requested"] * 2, ["completed"] * 2], logs
    assert child.returncode == 0, logs


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Weights of an undisturbed local run on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    file = run_file(folder / "here", {"env": variables("torch", environment())})
    hpctrain("run", "-n", 2, file)
    return weights(folder / "here" / "run", 1)


@pytest.mark.timeout(600)
def test_a_killed_rank_a_lost_host_and_a_stop_leave_the_weights_of_a_local_run(place, request, tmp_path, two_ranks):
    gate, folder = tmp_path / "gate", tmp_path / "there"
    gate.mkdir()
    run = folder / "run"
    file = run_file(folder, {"env": place.ranks, **launch_of(place, request, 1)}, str(gate))

    def said(child):
        logs = [path.read_text() for path in run.glob("logs/*")]
        return "\n".join([child.communicate(timeout=LAUNCH_S)[0], *logs])

    def wait_for_attempt(number, child):
        waits = gate / f"waiting-{number}"
        wait_for(waits.name, lambda: child.poll() is not None or waits.exists(), LAUNCH_S)
        assert child.poll() is None, said(child)

    with place.started(file) as child:
        wait_for_attempt(1, child)
        victim = collect(RunDir(run), 1)[1]
        assert victim.pid and victim.host
        place.kill(victim.host, victim.pid)
        wait_for_attempt(2, child)
        lost = next(word.host for word in collect(RunDir(run), 2) if word.host != place.hosts[0])
        assert lost
        place.lose(lost)
        wait_for_attempt(3, child)
        (gate / "slow").touch()  # so that ranks notice the request in time
        (run / "STOP").touch()
        (gate / "go-3").touch()
        text = said(child)
        assert child.returncode == (70 if place.queued else 75), text
    (gate / "slow").unlink()
    (gate / "go-4").touch()
    with place.started(file, resumes=True) as child:
        text = said(child)
        assert child.returncode == 0, text
    attempts = Attempts(RunDir(run)).all()
    assert [each.ranks for each in attempts] == [2, 2, 2, 2]
    killed, left, stopped, done = (each.verdict for each in attempts)
    assert killed and (killed.rank, killed.host) == (1, victim.host) and left and left.code == "node"
    assert [event["code"] for event in events(run, "recovered")] == ["killed", "node"]
    assert stopped and stopped.action == "stop" and done and done.action == "done"
    assert lost not in {word["host"] for word in last_words(run, 3)}
    assert weights(run, 4) == two_ranks


@pytest.mark.timeout(600)
def test_three_nodes_end_with_a_killed_supervisor_and_six_ranks_resume_on_new_ones_like_six_on_one(network, tmp_path):
    """With ``overlap``, sums are bitwise identical on any number of nodes."""
    gate, folder, reduce = tmp_path / "gate", tmp_path / "there", {"kind": "mpi", "overlap": "on"}
    gate.mkdir()
    ticket, ranks_env = tmp_path / "ticket", variables("torch", environment())
    hpctrain("run", "-n", 6, run_file(tmp_path / "here", {"env": ranks_env}, reduce=reduce))
    launch = {"engine": "runners", "ticket": str(ticket), "nodes": 3, "ranks_per_node": 2, "env": ranks_env}
    file = run_file(folder, launch, str(gate), reduce=reduce)
    own = environment(netns.INTERFACES)

    def started(stack, host, *words):
        command = network.on(host, "exec", sys.executable, "-m", "hpctrain", *words)
        return stack.enter_context(process(command, own))

    with on_hosts(network), ExitStack() as stack:
        nodes = [started(stack, host, "node", ticket) for host in range(3)]
        child = started(stack, 0, "run", file)
        wait_for("attempt", lambda: child.poll() is not None or (gate / "waiting-1").exists(), LAUNCH_S)
        assert child.poll() is None, child.communicate()[0]
        ranks = [word.pid for word in collect(RunDir(folder / "run"), 1)]
        assert len(ranks) == 6
        child.kill()
        ends = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [70, 70, 70]
        assert not any(
            "TimeoutError" in each for each in ends
        )  # they notice at once that it is gone, without waiting for a timeout
        wait_for("end of all ranks", lambda: all(map(gone, ranks)))
        (gate / "go-2").touch()
        nodes = [started(stack, host, "node", ticket) for host in range(3)]
        child = started(stack, 0, "run", file)
        said, _ = child.communicate(timeout=LAUNCH_S)
        assert child.returncode == 0, said
        assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0, 0]
    assert {word["host"] for word in last_words(folder / "run", 2)} == set(network.names)
    assert weights(folder / "run", 2) == weights(tmp_path / "here" / "run", 1)
