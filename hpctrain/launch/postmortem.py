"""What can be found out, after the end, about ranks that could not say it themselves."""

from __future__ import annotations

import dataclasses
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.errors import Code, ExitCode
from hpctrain.launch import launcher_messages
from hpctrain.run import deaths
from hpctrain.run.event_log import stored_events
from hpctrain.run.events import Hang
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import GOOD_ENDINGS, Ending, LastWord
from hpctrain.run.verdict import Verdict, failed_with
from hpctrain.system import cgroups, processes

FINAL = (ExitCode.USER_ERROR, ExitCode.DO_NOT_REQUEUE)
"""Of errors that come again in every attempt."""


def complete(word: LastWord, seen: Sequence[launcher_messages.Death], words: Sequence[LastWord]) -> LastWord:
    """Says for a rank that could not how it ended, as far as can be found out."""
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
    """The last line of a launcher's text that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=\t")]
    return lines[-1][:300] if lines else ""


def all_ended_well(words: Sequence[LastWord], ranks: int) -> bool:
    """Whether every rank says that it came to a good end."""
    return len(words) == ranks and all(word.ending in GOOD_ENDINGS for word in words)


def hang(run_dir: RunDir, attempt: int) -> Verdict | None:
    """Why the monitor ended the ranks, if it did; their deaths are its doing then."""
    for event in _hangs(run_dir, attempt):
        if event.kind == "hung" and event.action == "abort":
            culprit = next((rank.rank for rank in event.ranks), None)
            what = event.sentence or "no rank moved any more"
            fix = f"the stacks are in {run_dir.monitor}; the same command resumes from the last checkpoint"
            return failed_with(Code.HANG, what, fix, culprit)
    return None


def died_first(
    run_dir: RunDir, attempt: int, words: Sequence[LastWord] = (), bereaved: Collection[int] = ()
) -> list[int]:
    """The rank that the monitor saw die before any other; one that died after a rank's own error is its victim.

    ``bereaved`` are ranks that MPI ended because it had lost another one: one of another node, whose death may be noted
    later, or not at all. Of one node's ranks, the first one noted died first.
    """
    first_error = min((word.ended or 0 for word in words if word.ending is Ending.FAILED), default=float("inf"))
    noted = [rank for at, rank in deaths.noted(run_dir, attempt) if at < first_error]
    told = next((event for event in _hangs(run_dir, attempt) if event.kind == "died"), None)
    gone = [rank.rank for rank in (told.ranks if told else ()) if rank.rank is not None]
    seen = noted[:1] or gone
    if not set(seen) <= set(bereaved):
        return seen
    hosts = {word.rank: word.host for word in words}
    near = {hosts.get(rank) for rank in seen}
    noted, gone = ([it for it in ranks if it not in bereaved and hosts.get(it) not in near] for ranks in (noted, gone))
    return noted[:1] or gone or seen


def _hangs(run_dir: RunDir, attempt: int) -> list[Hang]:
    """What the monitor said of ranks that hang or died in an attempt."""
    try:
        told = stored_events(run_dir.monitor_events)
        return [event for event in told if isinstance(event, Hang) and event.attempt == attempt]
    except OSError:
        return []


def missing_ranks(
    words: Sequence[LastWord], ranks: int, text: str, banner: str, log: Path, hosts: Mapping[int, str]
) -> Verdict | None:
    """What happened to ranks that could not say: a node, or no start; from the launcher's text, kept in ``log``.

    ``banner`` ends with what MPICH's launcher says of deaths, after what rank 0 printed. ``hosts`` are those of ranks,
    as far as they are known beforehand.
    """
    if any(word.ending is Ending.FAILED and word.exit_code in FINAL for word in words):
        return None  # the run's own mistake, whatever else happened
    if (host := launcher_messages.lost_node(text)) is not None:
        what = f"{host} was lost, or the launcher's daemon on it" if host else f"a node was lost: {last_line(text)}"
        return failed_with(Code.NODE, what, "the same command resumes it", host=host or None)
    untold = {word.rank: word.host for word in words if word.ended is None and word.rank is not None}
    if silent := launcher_messages.silent(text, untold):
        return _lost(silent, untold[silent[0]])
    unstarted, why = launcher_messages.not_started(text)
    if unstarted:
        return _unstarted(unstarted, why, hosts)
    known = {word.rank for word in words if word.rank is not None}
    if any(word.ending in (Ending.FAILED, Ending.KILLED) for word in words) or len(known) == ranks:
        return None
    missing = sorted(set(range(ranks)) - known)
    dead = next((death for death in launcher_messages.deaths(text + banner) if death.rank in missing), None)
    told = f"rank {dead.rank} {dead.cause}" if dead else last_line(text) or last_line(banner)
    what = f"{len(missing)} of {ranks} ranks ended before they could say why: {told or 'nobody says'}"
    return failed_with(Code.VANISHED, what, f"see {log}", dead.rank if dead else None)


def _lost(ranks: Sequence[int], host: str) -> Verdict:
    """Slurm has lost these ranks, the first of them on this host."""
    several = f"ranks {', '.join(map(str, ranks[:8]))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    what = f"{host} was lost, or Slurm's daemon on it: nothing more was heard from {several}"
    fix = f"if it happens again, leave the host out (--exclude {host})"
    return failed_with(Code.NODE, what, fix, ranks[0], host)


def _unstarted(ranks: Sequence[int], why: str, hosts: Mapping[int, str]) -> Verdict:
    """Slurm did not start these ranks; that says nothing about the run."""
    host = hosts.get(ranks[0])
    where = f" on {host}" if host else ""
    what = f"rank {ranks[0]} could not be started{where}: Slurm says {why!r}"
    log = f"slurmd's log{where} shows the cause"
    fix = f"{log}; if it happens again, leave the host out (--exclude {host})" if host else log
    return failed_with(Code.NODE, what, fix, ranks[0], host)
