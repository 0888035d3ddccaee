"""Makes the runs of the corpus: each one is started as a user starts it, and its folder is kept."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil

from benchmarks.failures.cases import Case
from benchmarks.failures.corpus import keep
from hpctrain.run.folder import RunDir
from hpctrain.system.processes import own_session
from tests.support import netns
from tests.support.command import HPCTRAIN, environment, last_words, processes_of, reaches_step, wait_for
from tests.support.warm_ranks import variables

FRAMEWORKS = {"torch": "torch", "keras": "tensorflow"}
LIMIT_S = 150.0
"""Longest time for a run."""
MEMORY_BYTES = 1 << 30
STEPS, LONG = 12, 400
"""Steps of a run that fails by itself, and of one that is hit from outside."""


def make(case: Case, kept: Path) -> str:
    """Makes a run and keeps its folder at ``kept``; returns what the command printed."""
    with tempfile.TemporaryDirectory(prefix="failures-") as folder, contextlib.ExitStack() as around:
        here = Path(folder)
        (here / "run").mkdir()
        # SIGINT is ignored in what a shell starts in the background
        words, more = ["env", "--default-signal=INT", *run_of(case, here)], dict[str, str]()
        network = around.enter_context(hosts(here)) if case.around == "hosts" else None
        if network is not None:
            words, more = network.on(0, *words), {**netns.INTERFACES, "PYTHONPATH": str(Path.cwd())}
        elif case.around:
            words = around.enter_context(AROUND[case.around](here, words))
        elif case.program != "plain":
            more = variables(FRAMEWORKS.get(case.program, "torch"), environment())
        said = carried_out(case, here, words, environment(more), network)
        found = here / "kept" if case.around == "small" else here / "run"
        names = {name: f"host-{number}" for number, name in enumerate(network.names, 1)} if network else {}
        keep(found, kept, {folder: "/scratch/user/job", **names})
        return said


def run_of(case: Case, folder: Path) -> list[str]:
    """Writes a case's files, and returns the command that runs it."""
    steps = LONG if case.outside else STEPS
    keys: dict[str, Any] = {
        "name": "run", "run_dir": str(folder / "run"), "checkpoint": {"every_steps": 4},
        "launch": {"max_failures": 0, **case.keys.get("launch", {})},
    }  # fmt: skip
    if case.around == "hosts":
        shell = f"{folder}/network/agent {{host}}"
        keys["launch"] |= {"hosts": [f"{netns.SUBNET}.{1 + host}" for host in range(2)], "ranks_per_node": 1}
        keys["launch"]["remote_shell"] = shell
    command = ["run"] if case.around == "hosts" else ["run", "-n", str(case.ranks)]
    if case.program == "plain":
        sections = {**case.keys, "launch": keys["launch"]}
        flat = [word for key, section in sections.items() for name, value in section.items()
                for word in (f"--{key}.{name}", json.dumps(value).strip('"'))]  # fmt: skip
        program = ["-m", "benchmarks.failures.plain_program", case.fault or "none", str(case.rank), str(case.step)]
        words = [*HPCTRAIN, *command, "--name", "run", "--run_dir", keys["run_dir"], *flat, "--", sys.executable]
        return [*words, *program, "--steps", str(steps), *case.words]
    written = "def task" in case.program
    (folder / "mine.py").write_text(case.program)
    write_data(folder)
    args = {key: str(folder / value) if str(value).endswith(".h5") else value for key, value in case.task_args.items()}
    faulty = {"fault": case.fault, "rank": case.rank, "step": case.step} if case.fault else {}
    keys |= {
        "task": f"{folder}/mine.py:task" if written else f"benchmarks.failures.{case.program}_task:task",
        "task_args": {} if written else {**faulty, **args},
        "train": {"steps": steps, "global_batch": 8, "threads": 1},
        "reduce": {"kind": "mpi"}, "track": {"every_steps": 1},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps({**keys, **case.keys, "launch": keys["launch"]}))  # JSON is YAML
    return [*HPCTRAIN, *command, str(folder / "run.yaml")]


def write_data(folder: Path) -> None:
    """Writes files of HDF5 with which something is wrong."""
    x, y = np.ones((64, 3), np.float32), np.ones(64, np.float32)
    for name, arrays in (("cut", {"x": x, "y": y}), ("ragged", {"x": x, "y": y[1:]}), ("targets", {"x": x})):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for key, array in arrays.items():
                file[key] = array
    os.truncate(folder / "cut.h5", 2100)
    (folder / "text.h5").write_text("x,y\n1,2\n")


def carried_out(
    case: Case, folder: Path, words: list[str], variables: Mapping[str, str], network: netns.Network | None
) -> str:
    """Runs the command, does to it what comes from outside, and returns its output."""
    with own_session(variables) as session, (folder / "said").open("w+b") as said:
        child = subprocess.Popen(
            words,
            env=session,
            cwd=Path.cwd(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            if case.outside:
                wait_for(f"step {case.step}", lambda: is_at(case, folder / "run") or child.poll() is not None, LIMIT_S)
                hit(case, folder / "run", child, network)
            child.wait(LIMIT_S)
        finally:
            for process in processes_of(child.pid):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            child.kill()
            child.wait()
        return (folder / "said").read_text(errors="replace")


def is_at(case: Case, run: Path) -> bool:
    """Whether the run has come to the step at which it is hit; rank 0 of a plain program prints to the terminal."""
    if case.program != "plain":
        return bool(reaches_step(run, case.step)())
    return any(f"step {case.step} " in log.read_text() for log in RunDir(run).logs.glob("*-1-1.out"))


def hit(case: Case, run: Path, child: subprocess.Popen[bytes], network: netns.Network | None) -> None:
    """Does to a run what comes from outside."""
    what, _, whom = case.outside.partition(" ")
    if what == "STOP":
        (run / "STOP").touch()
        return
    pid = child.pid
    if whom.startswith("rank"):
        pid = last_words_of(run)[case.rank]
    elif whom == "mpirun":
        pid = next(each.pid for each in processes_of(child.pid) if each.name() in ("mpirun", "prterun", "prte"))
    elif whom == "daemon":
        assert network is not None
        pids = subprocess.run(["ip", "netns", "pids", network.names[1]], capture_output=True, text=True, check=True)
        pid = next(int(each) for each in pids.stdout.split() if psutil.Process(int(each)).name() == "prted")
    with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime: the answer will be wrong
        os.kill(pid, getattr(signal, f"SIG{what}"))


def last_words_of(run: Path) -> dict[int, int]:
    """Process ids of the ranks, by rank."""
    words = [json.loads(path.read_text()) for path in (run / "ranks").glob("1/*.json")]
    return {word["rank"]: word["pid"] for word in words} or {each["rank"]: each["pid"] for each in last_words(run)}


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[netns.Network]:
    """Two hosts (network namespaces)."""
    (folder / "network").mkdir()
    with netns.network(2, "1gbit", folder / "network") as network:
        yield network


@contextlib.contextmanager
def limited(folder: Path, words: list[str]) -> Iterator[list[str]]:
    """The command within a memory control group."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (old, "memory.limit_in_bytes") if old.is_dir() else (new, "memory.max")
    group = parent / f"hpctrain-failures-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(MEMORY_BYTES))
        yield ["bash", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "bash", *words]
    finally:
        wait_for("the group is empty", lambda: not (group / "cgroup.procs").read_text().split())
        group.rmdir()


@contextlib.contextmanager
def mounted(folder: Path, words: list[str], script: str) -> Iterator[list[str]]:
    """The command between the lines of a script, in a mount namespace."""
    yield ["unshare", "--mount", "bash", "-c", script.format(here=shlex.quote(str(folder))), "bash", *words]


def small(folder: Path, words: list[str]) -> contextlib.AbstractContextManager[list[str]]:
    """The run folder has a file system of 4 MiB, and is copied before that is gone."""
    script = 'mount -t tmpfs -o size=4M tmpfs {here}/run; "$@"; rm -f {here}/run/filler; cp -a {here}/run {here}/kept'
    return mounted(folder, words, script)


def read_only(folder: Path, words: list[str]) -> contextlib.AbstractContextManager[list[str]]:
    """A folder that may only be read, named by READ_ONLY."""
    (folder / "ro").mkdir()
    return mounted(folder, words, 'mount -t tmpfs -o ro tmpfs {here}/ro; READ_ONLY={here}/ro "$@"')


AROUND = {"memory": limited, "small": small, "read-only": read_only}


def remake(cases: list[Case], folder: Path) -> list[str]:
    """Makes the runs that ``folder`` does not hold yet; returns those that could not be made, with the reason."""
    failed = []
    for number, case in enumerate(cases, 1):
        kept = folder / case.label / case.name
        if kept.exists():
            continue
        try:
            said = make(case, kept)
        except (AssertionError, OSError, subprocess.SubprocessError, psutil.Error, netns.NotPermitted) as error:
            failed.append(f"{case.name}: {type(error).__name__}: {error}"[:600])
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        print(f"{number}/{len(cases)} {case.name}: {' '.join(said.split())[-160:]}", file=sys.stderr, flush=True)
    return failed
