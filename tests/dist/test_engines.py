"""Runs on nodes that others start: `hpctrain node`, a real Ray cluster, a real Spark cluster, on hosts with networks of
their own. Ranks are killed, a node is lost, the run is stopped and resumed, to the weights of an undisturbed local run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import collect
from tests.support import netns
from tests.support.command import PROJECT, environment, gone, hpctrain, last_words, wait_for, write_run
from tests.support.mpi import LAUNCH_S, PATIENCE_S
from tests.support.warm_ranks import variables

PROGRAMS = Path(__file__).parent / "programs"
TASK = PROJECT / "tests" / "tasks" / "torch_waiting_task.py"
JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"}
"""Processes of Spark start in half the time, and would compute longer."""
STEPS = 60

pytestmark = [pytest.mark.world_size(6)]


def run_file(folder: Path, launch: Mapping[str, Any], gate: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    return write_run(
        folder,
        task=f"{TASK}:task",
        run_dir=str(folder / "run"),
        task_args={"data": str(folder.parent / "digits"), "gate": gate},
        train={"steps": STEPS, "global_batch": 48, "threads": 1},
        checkpoint={"every_steps": 5},
        reduce={"kind": "mpi"},
        monitor={"enabled": False},
        launch={"env": variables("torch", environment()), **launch},
    )


def local_weights(folder: Path, ranks: int) -> set[str]:
    """Of an undisturbed run."""
    hpctrain("run", "-n", ranks, run_file(folder / "here", {}))
    return weights(folder / "here" / "run", 1)


def weights(run: Path, attempt: int) -> set[str]:
    return {word["weights_hash"] for word in last_words(run, attempt)}


@contextmanager
def started(network: netns.Network, host: int, *words: object, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command of ours on a host; its process is the command's own."""
    command = network.on(host, "exec", sys.executable, "-m", "hpctrain", *words)
    own = environment(netns.INTERFACES | more)
    child = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def said_by(program: str, *arguments: object, **more: str) -> str:
    """The last line that a program of programs/ prints; an argument that is no text is written as JSON or a path."""
    words = [each if isinstance(each, Path) else json.dumps(each) for each in arguments]
    command = [sys.executable, PROGRAMS / program, *words]
    done = subprocess.run(command, env=environment(more), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def require(package: str) -> Path:
    """The folder of a package, which is not imported; skips the test without it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(found.origin).parent


def require_spark() -> Path:
    """The folder of Spark; skips the test without it."""
    if not shutil.which("java"):
        pytest.skip("this machine lacks java (Debian: default-jre-headless)")
    return require("pyspark")


@contextmanager
def on_hosts(network: netns.Network) -> Iterator[None]:
    """Whatever is started on them ends with it."""
    try:
        yield
    finally:
        netns._end_processes(network.names)


@contextmanager
def runners(network: netns.Network) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """On each host a new `hpctrain node` after each run: keys of ``launch``, and variables for the supervisor."""
    ticket = network.folder / "ticket"
    loop = f"while :; do {sys.executable} -m hpctrain node {ticket}; done"
    nodes = [
        subprocess.Popen(network.on(host, "sh", "-c", loop), env=environment(), stderr=subprocess.DEVNULL)
        for host in range(3)
    ]
    with on_hosts(network):
        yield {"ticket": str(ticket)}, {}
    for node in nodes:
        node.wait()


@contextmanager
def ray(network: netns.Network) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """A Ray cluster of all hosts."""
    require("ray")
    few = ("--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats")
    head = f"{network.addresses[0]}:6379"
    program = Path(sys.executable).with_name("ray")
    with TemporaryDirectory(dir="/tmp") as folder, on_hosts(network):  # paths of Ray's sockets have 107 bytes at most
        own = {**os.environ, "RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
        for host, to in enumerate(
            (["--head", "--port=6379", "--include-dashboard=false"], *[[f"--address={head}"]] * 2)
        ):
            words = network.on(host, program, "start", *to, f"--node-ip-address={network.addresses[host]}", *few)
            for last in (False, False, True):  # Ray gives a node 30 s to start, which a busy machine may not keep
                done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=120)
                if done.returncode == 0:
                    break
                assert not last and "timed out during startup" in done.stdout + done.stderr, done.stdout + done.stderr
                netns._end_processes([network.names[host]])
        yield {}, {"RAY_ADDRESS": head}


@contextmanager
def spark(network: netns.Network) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """A Spark cluster: its master on the first host, a worker on each."""
    program = require_spark() / "bin" / "spark-class"
    python = {**JAVA, "PYSPARK_PYTHON": sys.executable}
    folder = network.folder / "spark"
    folder.mkdir()
    master = f"spark://{network.addresses[0]}:7077"
    settings = (
        "spark.ui.enabled false",
        "spark.executor.memory 512m",
        "spark.driver.memory 512m",
        f"spark.master {master}",
    )
    (folder / "spark-defaults.conf").write_text("\n".join(settings))

    def begin(host: int, role: str, *words: object) -> subprocess.Popen[bytes]:
        address = network.addresses[host]
        command = [program, f"org.apache.spark.deploy.{role.lower()}.{role}", "--host", address, *words]
        own = environment({**python, "SPARK_DAEMON_MEMORY": "128m", "SPARK_LOCAL_IP": address})
        with open(folder / f"{role}-{host}", "w") as log:
            return subprocess.Popen(network.on(host, *command), env=own, stdout=log, stderr=log)

    with on_hosts(network):
        begun = [begin(0, "Master", "--port", 7077, "--webui-port", 8080)]
        wait_for("master", lambda: "I have been elected leader" in (folder / "Master-0").read_text())
        more = ("-c", 1, "-m", "600m", "-d", folder / "work", master)
        begun += [begin(host, "Worker", *more) for host in range(3)]
        for log in (folder / f"Worker-{host}" for host in range(3)):
            wait_for("worker", lambda log=log: "registered with master" in log.read_text())
        local = {
            "SPARK_CONF_DIR": str(folder),
            "SPARK_LOCAL_IP": network.addresses[0],
            "PYSPARK_PYTHON": sys.executable,
        }
        yield {}, local
    for each in begun:
        each.wait()


@contextmanager
def hosts(network: netns.Network) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """No engine: two hosts by a remote shell."""
    shell = f"{network.folder}/agent {{host}}"
    with on_hosts(network):
        yield {"engine": None, "hosts": network.addresses[:2], "remote_shell": shell}, {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [hosts, ray])
def test_a_program_for_torchrun_gives_its_numbers_on_two_hosts(
    engine: Callable[[netns.Network], Any], network: netns.Network, tmp_path: Path
) -> None:
    with engine(network) as (launch, local):
        program = [sys.executable, str(PROGRAMS / "foreign_ddp.py")]
        nodes = {"engine": engine.__name__, "nodes": 2, "ranks_per_node": 1, "convention": "torch", **launch}
        file = write_run(tmp_path, run_dir=str(tmp_path / "run"), launch={"command": program, **nodes})
        with started(network, 0, "run", file, **local) as child:
            said, _ = child.communicate(timeout=LAUNCH_S)
    assert child.returncode == 0, said
    assert "weights -0.104762" in said, "what torchrun --standalone --nproc-per-node 2 prints"
    assert len({word["host"] for word in last_words(tmp_path / "run")}) == 2


def test_six_ranks_on_three_hosts_end_with_the_weights_of_six_on_one(network: netns.Network, tmp_path: Path) -> None:
    """With 16-bit messages each sum is formed in the order of the ranks; else those of a node add up theirs first."""
    keys = {
        "task": "hpctrain.tasks.torch_digits:task",
        "task_args": {"data": str(tmp_path / "digits")},
        "train": {"steps": 40, "global_batch": 48, "threads": 1},
        "reduce": {"kind": "mpi", "compression": "fp16"},
    }
    hpctrain("run", "-n", 6, write_run(tmp_path, run_dir=str(tmp_path / "here"), **keys), warm="torch")
    with hosts(network) as (launch, _):
        places = launch | {"hosts": network.addresses, "ranks_per_node": 2}
        file = write_run(tmp_path, run_dir=str(tmp_path / "there"), launch=places, **keys)
        with started(network, 0, "run", file) as child:
            said, _ = child.communicate(timeout=LAUNCH_S)
    assert child.returncode == 0, said
    assert [word["host"] for word in last_words(tmp_path / "there")] == [name for name in network.names for _ in "ab"]
    assert len(last_words(tmp_path / "here")) == 6
    assert weights(tmp_path / "there", 1) == weights(tmp_path / "here", 1)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Weights of a local run."""
    return local_weights(tmp_path_factory.mktemp("two"), 2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [runners, ray, spark])
def test_a_killed_rank_a_lost_node_and_a_stop_leave_the_weights_of_a_local_run(
    engine: Callable[[netns.Network], Any], network: netns.Network, tmp_path: Path, two_ranks: set[str]
) -> None:
    gate, folder = tmp_path / "gate", tmp_path / "there"
    gate.mkdir()
    run = folder / "run"
    with engine(network) as (launch, local):
        nodes = {"engine": engine.__name__, "nodes": 2, "spare_nodes": 1, "ranks_per_node": 1, **launch}
        file = run_file(folder, nodes, str(gate))
        with started(network, 0, "run", file, **local) as child:
            wait_for("attempt", lambda: child.poll() is not None or (gate / "waiting-1").exists(), 180)
            assert child.poll() is None, child.communicate()[0]
            victim = collect(RunDir(run), 1)[1]
            assert victim.pid
            os.kill(victim.pid, signal.SIGKILL)
            wait_for("second attempt", (gate / "waiting-2").exists)
            lost = next(word.host for word in collect(RunDir(run), 2) if word.host != network.names[0])
            netns._end_processes([lost])
            wait_for("attempt without that host", (gate / "waiting-3").exists)
            (gate / "slow").touch()  # so that ranks see the request in time
            (run / "STOP").touch()
            (gate / "go-3").touch()
            said, _ = child.communicate(timeout=LAUNCH_S)
            assert child.returncode == 75, said
        (gate / "slow").unlink()
        (gate / "go-4").touch()
        with started(network, 0, "run", file, "--launch.spare_nodes", 0, **local) as child:
            said, _ = child.communicate(timeout=LAUNCH_S)
            assert child.returncode == 0, said
    attempts = Attempts(RunDir(run)).all()
    assert [each.ranks for each in attempts] == [2, 2, 2, 2]
    killed, left = attempts[0].verdict, attempts[1].verdict
    assert killed and (killed.rank, killed.host) == (1, victim.host) and left and left.code == "node"
    assert lost not in {word["host"] for word in last_words(run, 3)}
    assert weights(run, 4) == two_ranks


@pytest.mark.timeout(600)
def test_three_nodes_end_with_a_killed_supervisor_and_six_ranks_resume_on_new_ones(
    network: netns.Network, tmp_path: Path
) -> None:
    gate, folder = tmp_path / "gate", tmp_path / "there"
    gate.mkdir()
    ticket = tmp_path / "ticket"
    launch = {"engine": "runners", "ticket": str(ticket), "nodes": 3, "ranks_per_node": 2}
    file = run_file(folder, launch, str(gate))
    with on_hosts(network), ExitStack() as stack:
        nodes = [stack.enter_context(started(network, host, "node", ticket)) for host in range(3)]
        child = stack.enter_context(started(network, 0, "run", file))
        wait_for("attempt", lambda: child.poll() is not None or (gate / "waiting-1").exists(), 180)
        assert child.poll() is None, child.communicate()[0]
        ranks = [word.pid for word in collect(RunDir(folder / "run"), 1)]
        assert len(ranks) == 6
        child.kill()
        ends = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [70, 70, 70]
        assert not any("TimeoutError" in each for each in ends)  # they see that it has gone, and wait for no silence
        wait_for("end of all ranks", lambda: all(map(gone, ranks)))
        (gate / "go-2").touch()
        nodes = [stack.enter_context(started(network, host, "node", ticket)) for host in range(3)]
        child = stack.enter_context(started(network, 0, "run", file))
        said, _ = child.communicate(timeout=LAUNCH_S)
        assert child.returncode == 0, said
        assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0, 0]
    assert {word["host"] for word in last_words(folder / "run", 2)} == set(network.names)
    assert len(weights(folder / "run", 2)) == 1, "all ranks hold the same weights"


@pytest.mark.timeout(600)
def test_a_sweep_of_ray_tune_hears_of_each_evaluation_and_ends_runs_early(tmp_path: Path) -> None:
    require("ray")
    run = {
        "name": "tuned",
        "task": "hpctrain.tasks.torch_digits:task",
        "task_args": {"data": str(tmp_path / "digits")},
        "train": {"global_batch": 48, "threads": 1, "eval_every_steps": 20, "eval_every_epochs": None},
        "reduce": {"kind": "mpi"},
        "monitor": {"enabled": False},
        "launch": {"nodes": 1, "ranks_per_node": 1, "env": variables("torch", environment())},
    }
    with TemporaryDirectory(dir="/tmp") as folder:  # paths of Ray's sockets have 107 bytes at most
        found = json.loads(said_by("ray_tune.py", tmp_path, run, RAY_TMPDIR=folder, HOME=folder))
    assert {lr: count for lr, (count, _) in found.items()} == {"1e-05": 1, "0.0001": 1, "0.001": 3, "0.005": 3}
    assert found["0.005"][1]["step"] == 60 and found["0.005"][1]["accuracy"] > found["0.0001"][1]["accuracy"]
    for lr in ("1e-05", "0.0001"):
        words = collect(RunDir(tmp_path / lr), 1)  # none are left once the supervisor has recorded them
        assert len(words) <= 1
        wait_for("end of the rank", lambda words=words: all(gone(word.pid) for word in words))


@pytest.mark.timeout(600)
def test_a_spark_program_trains_on_its_dataframe_as_on_the_arrays(tmp_path: Path) -> None:
    require_spark()
    run = {
        "name": "spark",
        "run_dir": str(tmp_path / "run"),
        "task": f"{PROJECT}/tests/tasks/torch_folder_task.py:task",
        "train": {"epochs": 2, "global_batch": 16, "threads": 1},
        "checkpoint": {"best_metric": "loss"},
        "reduce": {"kind": "mpi"},
        "monitor": {"enabled": False},
        "launch": {"nodes": 1, "ranks_per_node": 2, "env": variables("torch", environment())},
    }
    told, metrics, checkpoint, best = json.loads(said_by("spark_fit.py", run, **JAVA))
    assert checkpoint == best == str(tmp_path / "run" / "checkpoints" / "step-000000008")
    assert [each["step"] for each in told] == [4, 8] and {**metrics, "step": 8} == told[-1]
    arrays = {"x": np.random.default_rng(0).normal(size=(64, 4))}
    arrays["y"] = np.array([x.sum() for x in arrays["x"]])
    with h5py.File(tmp_path / "arrays.h5", "w") as file:
        file.update(arrays)
    here = {"run_dir": str(tmp_path / "here"), "task_args": {"data": str(tmp_path / "arrays.h5")}}
    hpctrain("run", "-n", 2, write_run(tmp_path, **{**run, **here, "launch": {}}), warm="torch")
    assert weights(tmp_path / "run", 1) == weights(tmp_path / "here", 1)
