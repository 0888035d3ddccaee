"""What can be found out afterwards about ranks that left no last word."""

from __future__ import annotations

import dataclasses
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.errors import Code, ExitCode
from hpctrain.launch import launcher_messages
from hpctrain.run.event_log import stored_events
from hpctrain.run.events import Hang
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import GOOD_ENDINGS, Ending, LastWord, noted_deaths
from hpctrain.run.verdict import RunVerdict, failed_with
from hpctrain.system import cgroups, processes

FINAL = (ExitCode.USER_ERROR, ExitCode.DO_NOT_REQUEUE)
"""Exit codes of errors that every attempt would repeat."""
LATE_NOTE_S = 2.0
"""Longest wait for the note of a death that explains the others."""
LOOK_AGAIN_S = 0.1


def complete(word: LastWord, seen: Sequence[launcher_messages.Death], words: Sequence[LastWord]) -> LastWord:
    """The word of a rank that left none, as far as its end can be found out."""
    if word.ending is not Ending.RUNNING:
        return word
    death = next((d for d in seen if d.rank == word.rank or (d.rank is None and d.pid == word.pid)), None)
    failed = any(other.ending is Ending.FAILED for other in words)
    if death is None or (death.maybe_victim and failed):
        return dataclasses.replace(word, ending=Ending.TAKEN_DOWN if failed or seen else Ending.VANISHED)
    local = word.host == socket.gethostname()
    if death.signal == signal.SIGKILL and local and ran_out_of_memory(word):
        death = dataclasses.replace(death, out_of_memory=True)
    exit_code = 128 + death.signal if death.signal else death.exit_code
    return dataclasses.replace(word, ending=Ending.KILLED, note=death.cause, code=death.code, exit_code=exit_code)


def ran_out_of_memory(word: LastWord) -> bool:
    """Whether the kernel's log names the process, or its control group (which is ours) counts one more such kill."""
    if processes.kernel_killed_for_memory(word.pid):
        return True
    now = cgroups.oom_kills()
    return word.oom_kills is not None and now is not None and now > word.oom_kills


def last_line(text: str) -> str:
    """The last line of a launcher's text with content."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=\t")]
    return lines[-1][:300] if lines else ""


def all_ended_well(words: Sequence[LastWord], ranks: int) -> bool:
    """Whether every rank ended well by its own word."""
    return len(words) == ranks and all(word.ending in GOOD_ENDINGS for word in words)


def hang(run_dir: RunDir, attempt: int) -> RunVerdict | None:
    """Why the monitor ended the ranks, if it did: it then caused their deaths."""
    for event in _hangs(run_dir, attempt):
        if event.kind == "hung" and event.action == "abort":
            culprit = next((rank.rank for rank in event.ranks), None)
            what = event.sentence or "no rank moved any more"
            fix = f"the stacks are in {run_dir.monitor}; the same command resumes from the last checkpoint"
            return failed_with(Code.HANG, what, fix, culprit)
    return None


def first_deaths(
    run_dir: RunDir, attempt: int, words: Sequence[LastWord], text: str, banner: str
) -> list[launcher_messages.Death]:
    """The deaths that explain those of all other ranks, from what agents noted and the launcher says.

    As long as only victims of another death are known, a note that comes later is waited for: nodes are not equally
    busy. ``banner``: see ``missing_ranks``.
    """
    untold = [word.rank for word in words if word.ended is None and word.rank is not None]
    said, end = text + banner, time.monotonic() + LATE_NOTE_S
    while True:
        codes = {noted.rank: noted.code for noted in noted_deaths(run_dir, attempt)}
        victims = launcher_messages.bereaved(said)
        victims |= {rank for rank, code in codes.items() if code == launcher_messages.MPI_ERR_UNKNOWN}
        first = launcher_messages.left(text, untold)
        first = first or died_first(run_dir, attempt, words, victims, launcher_messages.reported(said))
        if not first or not victims.issuperset(first) or time.monotonic() > end:
            return launcher_messages.deaths(said, first, codes)
        time.sleep(LOOK_AGAIN_S)


def died_first(
    run_dir: RunDir,
    attempt: int,
    words: Sequence[LastWord] = (),
    bereaved: Collection[int] = (),
    reported: Sequence[int] = (),
) -> list[int]:
    """The rank that the monitor saw die before any other; one that died after a rank's own error is its victim.

    ``bereaved`` are ranks that MPI ended because it had lost another one: one of another node, whose death may be noted
    later, or not at all. Of one node's ranks, the first one noted died first. ``reported`` are those of whose deaths
    the launcher tells, in its order: what is left where a node's agent was ended before it could note.
    """
    first_error = min((word.ended or 0 for word in words if word.ending is Ending.FAILED), default=float("inf"))
    hosts = {word.rank: word.host for word in words}
    first_of: dict[str | None, int] = {}
    for death in noted_deaths(run_dir, attempt):
        if death.at < first_error:
            first_of.setdefault(hosts.get(death.rank), death.rank)
    noted = list(first_of.values())
    told = next((event for event in _hangs(run_dir, attempt) if event.kind == "died"), None)
    gone = [rank.rank for rank in (told.ranks if told else ()) if rank.rank is not None]
    if own := [rank for rank in noted if rank not in bereaved]:
        return own[:1]
    near = {hosts.get(rank) for rank in noted[:1]}
    if elsewhere := [rank for rank in gone if rank not in bereaved and hosts.get(rank) not in near]:
        return elsewhere
    unheard = [rank for rank in reported if rank not in bereaved and rank in hosts and hosts[rank] not in first_of]
    return (unheard[:1] if noted or gone else []) or noted[:1] or gone


def _hangs(run_dir: RunDir, attempt: int) -> list[Hang]:
    """What the monitor said of ranks that hang or died in an attempt."""
    try:
        told = stored_events(run_dir.monitor_events)
        return [event for event in told if isinstance(event, Hang) and event.attempt == attempt]
    except OSError:
        return []


def missing_ranks(
    words: Sequence[LastWord], ranks: int, text: str, banner: str, log: Path, hosts: Mapping[int, str]
) -> RunVerdict | None:
    """What happened to ranks that could not say: a node, or no start; from the launcher's text, kept in ``log``.

    ``banner`` ends with what MPICH's launcher says of deaths, after what rank 0 printed. ``hosts`` are those of ranks,
    where known before the start.
    """
    if any(word.ending is Ending.FAILED and word.exit_code in FINAL for word in words):
        return None  # the run's own mistake, whatever else happened
    if (host := launcher_messages.lost_node(text, banner)) is not None:
        what = f"{host} was lost, or the launcher's daemon on it" if host else f"a node was lost: {last_line(text)}"
        return failed_with(Code.NODE, what, "the same command resumes it", host=host or None)
    untold = {word.rank: word.host for word in words if word.ended is None and word.rank is not None}
    if silent := launcher_messages.silent(text, untold):
        return lost(silent, untold[silent[0]])
    unstarted, why = launcher_messages.not_started(text)
    if unstarted:
        return _unstarted(unstarted, why, hosts)
    known = {word.rank for word in words if word.rank is not None}
    if any(word.ending in (Ending.FAILED, Ending.KILLED) for word in words) or len(known) == ranks:
        return None
    missing = sorted(set(range(ranks)) - known)
    dead = next((death for death in launcher_messages.deaths(text + banner) if death.rank in missing), None)
    told = f"rank {dead.rank} {dead.cause}" if dead else last_line(text) or last_line(banner)
    what = f"{len(missing)} of {ranks} ranks ended before they could say why: {told or 'nothing was said'}"
    return failed_with(Code.VANISHED, what, f"see {log}", dead.rank if dead else None)


def lost(ranks: Sequence[int], host: str, by_slurm: bool = True) -> RunVerdict:
    """Nothing is heard of these ranks, the first of them on this host; ``by_slurm``: as Slurm says."""
    several = f"ranks {', '.join(map(str, ranks[:8]))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    daemon, option = (", or Slurm's daemon on it", f" (--exclude {host})") if by_slurm else ("", "")
    what = f"{host} was lost{daemon}: nothing more was heard from {several}"
    return failed_with(Code.NODE, what, f"if it happens again, leave the host out{option}", ranks[0], host)


def _unstarted(ranks: Sequence[int], why: str, hosts: Mapping[int, str]) -> RunVerdict:
    """Slurm did not start these ranks; that says nothing about the run."""
    host = hosts.get(ranks[0])
    where = f" on {host}" if host else ""
    what = f"rank {ranks[0]} could not be started{where}: Slurm says {why!r}"
    log = f"slurmd's log{where} shows the cause"
    fix = f"{log}; if it happens again, leave the host out (--exclude {host})" if host else log
    return failed_with(Code.NODE, what, fix, ranks[0], host)
