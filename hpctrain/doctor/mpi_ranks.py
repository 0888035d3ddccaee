"""Measures MPI between ranks: transport, latency, bandwidth, thread level, cores."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpctrain.comm.launched import EXPECTED_RANKS
from hpctrain.comm.speeds import MARK as SPEEDS
from hpctrain.comm.speeds import Speeds
from hpctrain.comm.speeds import judge as judge_speeds
from hpctrain.doctor.check import Check, note, problem
from hpctrain.errors import RunFailed
from hpctrain.launch.mpi_library import ProgramResult, on_ranks, probe
from hpctrain.system import python
from hpctrain.system.cgroups import usable_cores

TIMEOUT_S = 120.0
SLOW_LATENCY_US = 20.0
"""Latency above which ranks on one node probably use the network stack or share a core."""

SAY_TRANSPORT = {
    "OMPI_MCA_ompi_display_comm": "mpi_finalize",  # Open MPI 5
    "OMPI_MCA_hook_comm_method_enable_mpi_finalize": "1",  # Open MPI 4.1
}


def findings(ranks: int) -> list[Check]:
    """Starts ranks on this machine and measures.

    Raises:
        UserError: there is no MPI, or no mpirun for it.
        RunFailed: the ranks do not start, do not find each other, or do not answer in time.
    """
    ended = started([__name__], ranks)
    facts = reported(ended, MARK, f"{ranks} ranks do not run")
    who = Check("ranks", f"{facts['ranks']} on {', '.join(facts['hosts'])}")
    return [who, *judge(facts, transport(ended.output + ended.messages, probe().version))]


def speeds(ranks: int) -> Iterator[Check]:
    """Measures links and devices with PyTorch, as gradients travel. Raises as ``findings``."""
    ended = started(["hpctrain.backends.torch.measure"], ranks)
    found = Speeds.read(reported(ended, SPEEDS, "links are not measured"))
    yield from (Check(topic, figure) for topic, figure in found.sentences())
    yield from ((problem if one.fatal else note)("slow", one.what, one.fix) for one in judge_speeds(found))


def started(words: Sequence[str], ranks: int) -> ProgramResult:
    """Starts a module with its arguments on ranks of this machine, and waits for its end. Raises as ``findings``."""
    ours = {EXPECTED_RANKS: str(ranks), "OMP_NUM_THREADS": "1", **SAY_TRANSPORT}
    try:
        return on_ranks(python.module(*words), ranks, probe(), {**os.environ, **ours}, TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        fix = "a firewall or a broken network interface: try OMPI_MCA_btl=self,sm, or name the interface to use"
        raise RunFailed(f"{ranks} ranks did not answer within {TIMEOUT_S:.0f} s", fix) from error


def reported(ended: ProgramResult, mark: str, problem: str) -> dict[str, Any]:
    """Returns the JSON after ``mark`` in the ranks' output. Raises RunFailed with their last line if it is missing."""
    found = next((line for line in ended.output.splitlines() if line.startswith(mark)), None)
    if found is None:
        said = [line for line in (ended.output + ended.messages).splitlines() if line.strip(" -\0")]
        raise RunFailed(f"{problem}: {said[-1][:300] if said else 'they print nothing'}", "hpctrain doctor says more")
    return dict(json.loads(found.removeprefix(mark)))


def transport(text: str, version: str) -> str:
    """Transport of messages between ranks, from the library's output at its end; Open MPI only."""
    on_host = re.search(r"on-host:\s+all connections are (\S+)", text)
    off_host = re.search(r"off-host:\s+all connections are (\S+)", text)
    places = ((on_host, "within a node"), (off_host, "between nodes"))
    parts = [f"{found[1]} {where}" for found, where in places if found and found[1] != "n/a"]
    return ", ".join(parts) or f"not known from {version}"


def judge(facts: dict[str, Any], transport: str) -> Iterator[Check]:
    """Turns measurements into findings."""
    if re.search(r"\btcp within", transport):
        fix = "let MPI use shared memory: more room in /dev/shm, and no OMPI_MCA_btl or UCX_TLS that leave it out"
        yield problem("transport", transport, fix)
    else:
        yield Check("transport", transport)
    if "latency_us" in facts:
        latency = f"{facts['latency_us']:.1f} us"
        if facts["latency_us"] > SLOW_LATENCY_US and facts["nodes"] == 1:
            yield note("latency", latency, "more ranks than cores, or a busy machine? start fewer ranks")
        else:
            yield Check("latency", latency)
        allreduce = f"4 MiB allreduce in {facts['allreduce_4mb_ms']:.2f} ms"
        yield Check("bandwidth", f"{facts['bandwidth_gb_s']:.1f} GB/s one way, {allreduce}")
    if not facts["threads"]:
        yield problem("MPI threads", "below level multiple", "use an MPI built with MPI_THREAD_MULTIPLE")
    if min(facts["cores"]) == 1 and max(facts["cores"]) < usable_cores():
        fix = "mpirun --bind-to none: loaders and helpers need cores too"
        yield note("binding", "each rank is bound to one core", fix)


MARK = "hpctrain-link:"
LATENCY_BYTES = 8
BANDWIDTH_BYTES = 4 * 2**20


def main() -> None:
    """Measures between rank 0 and the last rank (on another node if there are several); prints one JSON line."""
    from mpi4py import MPI

    from hpctrain.comm.world import connect

    world = connect()
    comm = MPI.COMM_WORLD
    peer = world.size - 1
    facts: dict[str, Any] = {
        "ranks": world.size,
        "nodes": world.nodes,
        "hosts": sorted(set(world.everyone.allgather(socket.gethostname(), "name the hosts"))),
        "cores": world.everyone.allgather(len(os.sched_getaffinity(0)), "count the cores"),
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    }
    if world.size > 1:
        facts["latency_us"] = 1e6 * ping_pong(comm, world.rank, peer, LATENCY_BYTES, rounds=1000)
        facts["bandwidth_gb_s"] = BANDWIDTH_BYTES / ping_pong(comm, world.rank, peer, BANDWIDTH_BYTES, rounds=30) / 1e9
        facts["allreduce_4mb_ms"] = 1e3 * allreduce(comm, BANDWIDTH_BYTES, rounds=20)
    if world.rank == 0:
        print(MARK + json.dumps(facts), flush=True)


def ping_pong(comm: Any, rank: int, peer: int, size: int, rounds: int) -> float:
    """Median one-way seconds between rank 0 and ``peer`` after a warm-up; other ranks wait."""
    buffer = np.zeros(size, dtype=np.uint8)
    times = []
    comm.Barrier()
    for _ in range(rounds + rounds // 5):
        begin = time.perf_counter()
        if rank == 0:
            comm.Send(buffer, peer)
            comm.Recv(buffer, peer)
        elif rank == peer:
            comm.Recv(buffer, 0)
            comm.Send(buffer, 0)
        times.append((time.perf_counter() - begin) / 2)
    comm.Barrier()
    return statistics.median(times[rounds // 5 :])


def allreduce(comm: Any, size: int, rounds: int) -> float:
    """Median seconds of a float32 allreduce over all ranks."""
    values = np.ones(size // 4, dtype=np.float32)
    total = np.empty(size // 4, dtype=np.float32)
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        comm.Allreduce(values, total)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
