"""Faults of a run: processes killed or stopped for seconds, memory exhausted, a full disk, links that are cut."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import invariants
from tests.support import netns
from tests.support.netns import Network
from tests.support.warm_ranks import variables

ROOT = Path(__file__).parents[2]
SIGNALS = [
    ("rank", signal.SIGKILL),
    ("rank", signal.SIGKILL),
    ("launcher", signal.SIGKILL),
    ("supervisor", signal.SIGKILL),
    ("agent", signal.SIGKILL),
    ("rank", signal.SIGSTOP),
    ("agent", signal.SIGSTOP),
    ("supervisor", signal.SIGSTOP),
    ("launcher", signal.SIGSTOP),
]
Fault = tuple[str, signal.Signals | None]
"""What is hit, and the signal it gets, if any."""
KINDS: list[Fault] = [*SIGNALS, ("memory", None)]
DISK: list[Fault] = [("disk", None), ("disk", None), *KINDS]
LINKS: list[Fault] = [("link", None), ("link", None), ("link", None), ("daemon", signal.SIGKILL), *KINDS]
HOSTS = 3
DISK_MB = 48
FAILED = 70
"""Exit code of a run that the same command resumes."""
FULL_S = 3.0
"""Seconds during which nothing can be written to the run folder."""
CUT_S = (1.0, 6.0)
"""Seconds for which a link is cut: too short to count as a hang."""
STOPPED_S = 2.0
"""Seconds between SIGSTOP and SIGCONT: too short to count as a hang."""
UNTIL_THE_END = 10
"""Last steps of a run, which get no faults: a rank that has finished its work is not missed."""
DEADLINE_S = 120.0
"""Seconds within which training must make progress after any fault."""
STEPS_PER_FAULT = 30
"""Approximate number of steps between faults. The number injected before the run ended is printed."""
SECTIONS = dict[str, Any]
SNAPSHOTS: SECTIONS = {"checkpoint": {"every_steps": 40, "tiers": {"memory": {"every_steps": 3}}}}
PLANS: dict[str, tuple[str, int, SECTIONS, list[Fault]]] = {
    "torch": ("torch", 3, {}, KINDS),
    "torch-sharded": ("torch", 2, {"parallel": {"shard": "optimizer"}}, KINDS),
    "torch-tensor": ("torch", 2, {"parallel": {"tensor": 2}}, KINDS),
    "torch-pipeline": ("torch", 2, {"parallel": {"pipeline": 2}}, KINDS),
    "torch-snapshots": ("torch", 2, SNAPSHOTS, KINDS),
    "torch-disk": ("torch", 2, {}, DISK),
    "torch-hosts": ("torch", 6, {}, LINKS),
    "keras": ("keras", 2, {}, KINDS),
}
"""Name -> framework, ranks, sections of the run file, and kinds of faults. torch-disk has its run folder on a small
separate file system, torch-hosts has hosts with two ranks each. Both need root."""


class Hung(AssertionError):
    """No progress for too long, or the run gave up."""


class Chaos:
    """One run of a plan, in a folder."""

    def __init__(self, folder: Path, plan: str, steps: int, network: Network | None, is_warm: bool = True) -> None:
        """If ``folder`` is named quiet, the run gets no faults and its steps do not pause."""
        self.folder, self.run, self.network = folder, folder / "run", network
        framework, self.ranks, sections, self.kinds = PLANS[plan]
        self.framework = {"keras": "tensorflow"}.get(framework, framework)
        self.steps, self.is_warm = steps, is_warm
        self.befallen = 0
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        content = {
            "name": "chaos",
            "run_dir": str(self.run),
            "task": f"tests.chaos.task_{framework}:task",
            "task_args": {"folder": str(folder), **({"pause_s": 0.0} if folder.name == "quiet" else {})},
            "train": {"steps": steps, "global_batch": 24, "threads": 1},
            "checkpoint": {"every_steps": 5},
            "reduce": {"kind": "mpi"},
            "track": {"every_steps": 1},
            "launch": {"max_failures": 3, **(hosts(network) if network else {})},
            **sections,
        }
        (folder / "run.yaml").write_text(json.dumps(content))
        self.log = folder / "log"

    def start(self) -> psutil.Popen:
        """Start the command, as a user would type it again after each end."""
        words = [sys.executable, "-m", "hpctrain", "run", "-n", str(self.ranks), str(self.folder / "run.yaml")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        if self.is_warm:
            environment |= variables(self.framework, environment)
        if self.network:
            words = self.network.on(0, *words)
            subnet = f"{netns.SUBNET}.0/24"
            environment |= {"PRTE_MCA_prte_if_include": subnet, "OMPI_MCA_btl_tcp_if_include": subnet}
            environment |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
        with self.log.open("ab") as log:
            return psutil.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def lines(self) -> int:
        """Lines that all ranks have written: the number grows while they train."""
        return sum(path.read_bytes().count(b"\n") for path in self.folder.glob("rank-*.ids"))

    def step(self) -> int:
        """The last step that rank 0 has written."""
        notes = self.folder / "rank-0.ids"
        lines = notes.read_text().split("\n")[:-1] if notes.exists() else []
        return int(lines[-1].split()[0]) if lines else 0

    def progresses(self, child: psutil.Popen, by: int) -> bool:
        """Wait until ranks have written ``by`` more lines; False if the command ended first. Raises Hung."""
        wanted, end = self.lines() + by, time.monotonic() + DEADLINE_S
        while self.lines() < wanted:
            if child.poll() is not None:
                return False
            if time.monotonic() > end:
                raise Hung(f"nothing moved for {DEADLINE_S:.0f} s:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.01)
        return True

    def process(self, child: psutil.Popen, target: str, random_rank: int) -> tuple[psutil.Process, int] | None:
        """A process of the run, and its rank or -1; None if there is no such process at the moment."""
        if target == "rank":
            with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):  # it has just ended or started
                newest = max((self.run / "ranks").glob("*/"), key=lambda folder: int(folder.name))
                words = [json.loads(path.read_text()) for path in newest.glob("*.json")]
                pids = {word["rank"]: word["pid"] for word in words}
                return psutil.Process(pids[random_rank]), random_rank
            return None
        for each in self.processes(child):
            with contextlib.suppress(psutil.Error):
                words = each.cmdline()
                program = Path(words[0]).name if words else ""
                found = {
                    "launcher": program in ("mpirun", "prterun"),
                    "daemon": program == "prted",
                    "agent": "hpctrain.monitor.node.agent" in words,
                    "supervisor": words[1:4] == ["-m", "hpctrain", "run"],
                }
                if found[target]:
                    return each, -1
        return None

    def processes(self, child: psutil.Popen) -> list[psutil.Process]:
        """All processes of the run."""
        found = [child, *child.children(recursive=True)]
        for name in self.network.names if self.network else ():
            for pid in netns._do("ip", "netns", "pids", name).split():
                with contextlib.suppress(psutil.Error):
                    found.append(psutil.Process(int(pid)))
        return found

    def to_its_end(self, seed: str, faults: int) -> list[dict[str, Any]]:
        """Run to completion while injecting faults; return those that ended an attempt. Raises Hung."""
        chance, fatal = random.Random(seed), []
        child = self.start()
        try:
            while True:
                # Longer than two checkpoint intervals: no three failures in a row without a new checkpoint.
                alive = self.progresses(child, chance.randrange(12 * self.ranks, 20 * self.ranks))
                if not alive and child.returncode == 0:
                    return fatal
                # There is no spare for a lost host.
                lost_host = child.returncode == FAILED and fatal and fatal[-1]["target"] == "daemon"
                if not alive and not lost_host and child.returncode not in (-signal.SIGKILL, 128 + signal.SIGKILL):
                    raise Hung(f"exit code {child.returncode}:\n{self.log.read_text()[-2000:]}")
                if not alive:
                    child = self.start()
                elif faults > 0 and self.steps - self.step() > UNTIL_THE_END:
                    target, number = chance.choice(self.kinds)
                    rank = chance.randrange(self.ranks)
                    faults -= 1
                    self.befallen += 1
                    others = {"memory": self.memory_ends, "disk": self.disk_is_full, "link": self.link_is_cut}
                    if others[target](rank) if number is None else self.befalls(child, target, number, rank):
                        fatal.append({"target": target, "rank": rank})
        finally:
            for each in self.processes(child) if child.is_running() else (child,):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            child.wait()

    def befalls(self, child: psutil.Popen, target: str, number: signal.Signals, rank: int) -> bool:
        """Inject one fault; return whether it ends the attempt."""
        found = self.process(child, target, rank)
        if found is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            found[0].send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(STOPPED_S)  # the fault itself: a process that does nothing for a while
                found[0].send_signal(signal.SIGCONT)
            return number == signal.SIGKILL and target != "agent"
        return False

    def memory_ends(self, rank: int) -> bool:
        """Let a rank run out of memory, see ``notes``."""
        (self.folder / f"eat-{rank}").touch()
        return True

    def disk_is_full(self, rank: int) -> bool:
        """Fill the file system of the run folder for some seconds."""
        ballast = self.run / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        time.sleep(FULL_S)  # the fault itself
        ballast.unlink()
        return False

    def link_is_cut(self, rank: int) -> bool:
        """Cut the link of a rank's host for some seconds."""
        assert self.network is not None
        self.network.cut(rank % HOSTS)
        time.sleep(CUT_S[self.befallen % 2])  # the fault itself
        self.network.heal(rank % HOSTS)
        return False


def hosts(network: Network) -> SECTIONS:
    """Keys of ``launch`` for a run on these hosts."""
    return {"hosts": network.addresses, "ranks_per_node": 2, "remote_shell": f"{network.folder}/agent {{host}}"}


def chaos(folder: Path, plan: str, seed: int, faults: int, is_warm: bool = True) -> list[str]:
    """Differences between a run with faults and an undisturbed one; empty if there are none. Raises NotPermitted.

    ``is_warm``: fork ranks from a process that has imported their framework, which takes a third of the time per fault.
    """
    with contextlib.ExitStack() as stack:
        kinds, network = PLANS[plan][3], None
        if kinds is LINKS:
            place = folder / "network"
            place.mkdir(parents=True)
            network = stack.enter_context(netns.network(HOSTS, "1gbit", place))
        steps = STEPS_PER_FAULT * (faults + 1)
        quiet, tried = (Chaos(folder / name, plan, steps, network, is_warm) for name in ("quiet", "tried"))
        if kinds is DISK:
            stack.enter_context(small_disk(tried.run))
        begun = time.monotonic()
        quiet.to_its_end("", 0)
        quiet_s = time.monotonic() - begun
        fatal = tried.to_its_end(f"{plan} {seed}", faults)
        wrong = invariants.differences(tried.run, tried.folder, quiet.run, quiet.folder, steps)
        wrong += invariants.explained(tried.run, fatal)
        places = [place / name for name in network.names] if network else [tried.temporary]
        if left := [path.name for each in places for path in each.iterdir() if "hpctrain" in path.name]:
            wrong.append(f"left behind: {left}")
        for name in network.names if network else ():
            if pids := netns._do("ip", "netns", "pids", name).split():
                wrong.append(f"processes {pids} are left on {name}")
        each_s = (time.monotonic() - begun - 2 * quiet_s) / max(1, tried.befallen)
        print(
            f"{plan}, seed {seed}: {tried.befallen} of {faults} faults befell the run, {len(fatal)} ended an attempt; "
            f"a fault took {each_s:.1f} s, the quiet run {quiet_s:.0f} s",
            flush=True,
        )
        return wrong


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system at ``folder``."""
    folder.mkdir()
    netns._do("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(folder))
    try:
        yield
    finally:
        netns._do("umount", "--lazy", str(folder))
