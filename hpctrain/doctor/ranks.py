"""MPI between ranks as it really is: transport, latency, bandwidth, thread level, cores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpctrain.comm.world import EXPECTED_RANKS
from hpctrain.doctor.finding import Finding, note, problem
from hpctrain.doctor.link import MARK
from hpctrain.errors import RunFailed
from hpctrain.launch.mpi_library import MpiRun, find_mpirun, launcher_environment, probe
from hpctrain.system import processes, python
from hpctrain.system.cores import usable_cores
from hpctrain.system.processes import own_session

TIMEOUT_S = 120.0
POLL_S = 0.05
ENDED_S = 5.0
"""Seconds that mpirun has to end after all its ranks have. One whose ranks fail while MPI starts may wait for ever."""
SLOW_LATENCY_US = 20.0
"""Above this, ranks on one node go through the network stack or share a core."""

SAY_TRANSPORT = {
    "OMPI_MCA_ompi_display_comm": "mpi_finalize",  # Open MPI 5
    "OMPI_MCA_hook_comm_method_enable_mpi_finalize": "1",  # Open MPI 4.1
}


def findings(ranks: int) -> list[Finding]:
    """Starts this number of ranks on this machine and measures.

    Raises:
        UserError: no MPI, or no mpirun for it.
        RunFailed: the ranks do not start, or do not find each other.
    """
    library = probe()
    mpirun = MpiRun(find_mpirun(library), library.flavour)
    cores = usable_cores()
    ours = {EXPECTED_RANKS: str(ranks), "OMP_NUM_THREADS": "1", **SAY_TRANSPORT}
    environment = {**os.environ, **launcher_environment(mpirun.flavour, ranks > cores, os.environ), **ours}
    words = [*mpirun.argv(ranks, {}, cores), *python.module("hpctrain.doctor.link")]
    try:
        with own_session(environment) as session:
            output, messages = answer(words, session)
    except subprocess.TimeoutExpired as error:
        fix = "a firewall or a broken network interface: try OMPI_MCA_btl=self,sm, or name the interface to use"
        raise RunFailed(f"{ranks} ranks did not answer within {TIMEOUT_S:.0f} s", fix) from error
    text = output + messages
    line = next((line for line in output.splitlines() if line.startswith(MARK)), None)
    if line is None:
        said = [line for line in text.splitlines() if line.strip(" -")]
        what = said[-1][:300] if said else "they print nothing"
        raise RunFailed(f"{ranks} ranks do not run: {what}", "hpctrain doctor looks at MPI")
    facts = json.loads(line.removeprefix(MARK))
    who = Finding("ranks", f"{facts['ranks']} on {', '.join(facts['hosts'])}")
    return [who, *judge(facts, transport(text, library.version))]


def answer(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """What a launcher and its ranks print, on standard output and on standard error.

    Raises:
        subprocess.TimeoutExpired: they do not end in time.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output, tempfile.TemporaryFile("w+") as messages:
        launcher = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=messages, text=True
        )
        begin = alone_since = time.monotonic()
        has_started = False
        try:
            while launcher.poll() is None and (now := time.monotonic()) < alone_since + ENDED_S:
                if now > begin + TIMEOUT_S:
                    raise subprocess.TimeoutExpired(words, TIMEOUT_S)
                is_alone = not processes.has_children(launcher.pid)
                has_started |= not is_alone
                if not (has_started and is_alone):
                    alone_since = now
                time.sleep(POLL_S)
        finally:
            launcher.kill()
            launcher.wait()
        texts = []
        for file in (output, messages):
            file.seek(0)
            texts.append(file.read())
    return texts[0], texts[1]


def transport(text: str, version: str) -> str:
    """What carries messages between ranks, from what the library says at its end; Open MPI only."""
    on_host = re.search(r"on-host:\s+all connections are (\S+)", text)
    off_host = re.search(r"off-host:\s+all connections are (\S+)", text)
    places = ((on_host, "within a node"), (off_host, "between nodes"))
    parts = [f"{told[1]} {where}" for told, where in places if told and told[1] != "n/a"]
    return ", ".join(parts) or f"not known from {version}"


def judge(facts: dict[str, Any], carried_by: str) -> Iterator[Finding]:
    """What the measured numbers mean."""
    if re.search(r"\btcp within", carried_by):
        fix = "let MPI use shared memory: more room in /dev/shm, and no OMPI_MCA_btl or UCX_TLS that leave it out"
        yield problem("transport", carried_by, fix)
    else:
        yield Finding("transport", carried_by)
    if "latency_us" in facts:
        latency = f"{facts['latency_us']:.1f} us"
        if facts["latency_us"] > SLOW_LATENCY_US and facts["nodes"] == 1:
            yield note("latency", latency, "more ranks than cores, or a busy machine? start fewer ranks")
        else:
            yield Finding("latency", latency)
        allreduce = f"4 MiB allreduce in {facts['allreduce_4mb_ms']:.2f} ms"
        yield Finding("bandwidth", f"{facts['bandwidth_gb_s']:.1f} GB/s one way, {allreduce}")
    if not facts["threads"]:
        yield problem("MPI threads", "below level multiple", "use an MPI built with MPI_THREAD_MULTIPLE")
    if min(facts["cores"]) == 1 and max(facts["cores"]) < usable_cores():
        fix = "mpirun --bind-to none: loaders and helpers need cores too"
        yield note("binding", "each rank is bound to one core", fix)
