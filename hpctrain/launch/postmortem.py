"""Finds out, after an attempt, what happened to ranks that left no last word."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpctrain.errors import Code, ExitCode
from hpctrain.launch import launcher_messages
from hpctrain.run.event_log import stored_events
from hpctrain.run.events import CUT_OFF, Hang
from hpctrain.run.first_cause import LATE_NOTE_S, Death, Fact, Found, Standing, first_cause, is_victim
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import GOOD_ENDINGS, Ending, LastWord, noted_deaths
from hpctrain.run.verdict import Action, RunVerdict, failed_with
from hpctrain.system import processes

RULE = re.compile(r"^-{60,}$", re.MULTILINE)
"""The lines around Open MPI's banners."""
ABOUT_RANKS = re.compile(r"\s*(WARNING|Primary job|\S+\s+(noticed|detected|has\s+exited))")
"""Matches banners that warn, or report how ranks ended."""
PASSES = re.compile(r"connect|temporary|timed out", re.IGNORECASE)
"""Matches what remote shells say of hosts that may answer later; all else needs a person."""
LOOK_AGAIN_S = 0.1
FILES, FILES_OF_RANK = 64, 8
"""Descriptors that a launcher needs at most: for itself, and for each rank."""
LAUNCHER_BYTES = 1 << 20
"""Room that a launcher needs at most for its temporary files."""


def settled(look: Callable[[], Sequence[Fact]]) -> Fact | None:
    """Returns the first cause of the failure, after waiting up to LATE_NOTE_S for notes that could change it.

    It waits as long as the only known ranks are victims of another death, or a rank's cause of death is missing: busy
    nodes write their notes late.
    """
    end = time.monotonic() + LATE_NOTE_S
    while True:
        facts = look()
        cause = first_cause(facts)
        if not may_change(cause, facts) or time.monotonic() > end:
            return cause
        time.sleep(LOOK_AGAIN_S)


def may_change(cause: Fact | None, facts: Sequence[Fact]) -> bool:
    """Whether a late note could replace this cause, or say what the rank died of."""
    if cause is None or isinstance(cause, Found):
        return False
    words = [fact for fact in facts if isinstance(fact, LastWord)]
    hosts = {word.host for word in words if word.ending is Ending.RUNNING}
    elsewhere = bool(hosts - {word.host for word in words if word.rank == cause.rank})
    if isinstance(cause, LastWord):
        return is_victim(cause) and elsewhere
    return cause.standing is Standing.GONE or (cause.standing > Standing.KILLED and elsewhere)


def facts_of(run_dir: RunDir, attempt: int, words: Sequence[LastWord], text: str, banner: str) -> list[Fact]:
    """Returns the facts from last words, agents' notes, the monitor and the launcher. ``banner``: see ``lost_node``."""
    without_word = unreported(words)
    found: list[Fact] = [*words, *launcher_messages.deaths(text + banner)]
    found += [Death(rank, exit_code=0, standing=Standing.LEFT) for rank in launcher_messages.left(text, without_word)]
    for note in noted_deaths(run_dir, attempt):
        standing = Standing.NOTED if note.alone else Standing.SWEPT
        death = Death(note.rank, exit_code=note.code, standing=standing, at=note.at)
        if note.code is not None and note.code < 0:
            death = dataclasses.replace(death, exit_code=None, signal=-note.code)
        found.append(death)
    for event in hangs(run_dir, attempt):
        about = ranks_of(event)
        if event.kind == "died":
            found += [Death(rank, standing=Standing.GONE) for rank in about]
        elif event.kind == CUT_OFF and about and without_word.keys() >= set(about):
            verdict = host_lost(about, without_word[about[0]], by_slurm=False)
            # Code.NODE would say the node is lost, and the host may only be cut off for a while.
            found.append(Found(Standing.CUT_OFF, dataclasses.replace(verdict, code=Code.VANISHED)))
        elif event.kind == "hung" and event.action == "abort":
            what = event.sentence or "no rank made progress"
            fix = f"the stacks are in {run_dir.monitor}; the same command resumes from the last checkpoint"
            found.append(Found(Standing.HUNG, failed_with(Code.HANG, what, fix, about[0] if about else None)))
    return found


def unreported(words: Sequence[LastWord]) -> dict[int, str]:
    """The hosts of ranks whose last words do not say how they ended, by rank."""
    return {word.rank: word.host for word in words if word.ended is None and word.rank is not None}


def with_endings(words: Sequence[LastWord], cause: Fact | None) -> list[LastWord]:
    """Returns the last words, with endings filled in for ranks that left none, one of which may be the cause."""
    is_known = isinstance(cause, Death) or any(word.ending is Ending.FAILED for word in words)
    rest = Ending.TAKEN_DOWN if is_known else Ending.VANISHED
    found = []
    for word in words:
        if word.ending is not Ending.RUNNING:
            found.append(word)
        elif isinstance(cause, Death) and cause.rank == word.rank:
            found.append(killed(word, cause))
        else:
            found.append(dataclasses.replace(word, ending=rest))
    return found


def killed(word: LastWord, death: Death) -> LastWord:
    """Returns a rank's last word with the death that ended it."""
    if death.signal == signal.SIGKILL and word.host == socket.gethostname():
        starved = death.out_of_memory or processes.ran_out_of_memory(word.pid, word.birth, word.oom_kills)
        death = dataclasses.replace(death, out_of_memory=starved)
    exit_code = death.status or None
    return dataclasses.replace(word, ending=Ending.KILLED, note=death.cause, code=death.code, exit_code=exit_code)


def startup_error(text: str) -> str:
    """Returns the first sentence in which MPI or mpirun says why no rank could start; empty if there is none."""
    for banner in RULE.split(text)[1::2]:
        if banner.strip() and not ABOUT_RANKS.match(banner):
            return first_paragraph(banner).partition(". ")[0][:300]
    return ""


def last_line(text: str) -> str:
    """Returns the last non-empty line of a launcher's text, or the first paragraph of a banner at its end."""
    *before, banner, rest = ["", *RULE.split(text.rstrip())]
    if before and not rest:
        return first_paragraph(banner)[:300]
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=\t")]
    return lines[-1][:300] if lines else ""


def first_paragraph(banner: str) -> str:
    """A banner's first paragraph as one line."""
    return " ".join(banner.strip().partition("\n\n")[0].split())


def all_ended_well(words: Sequence[LastWord], ranks: int) -> bool:
    """Whether every rank's last word reports a good ending."""
    return len(words) == ranks and all(word.ending in GOOD_ENDINGS for word in words)


def hangs(run_dir: RunDir, attempt: int) -> list[Hang]:
    """Returns the monitor's events about ranks that hung, died or were cut off in an attempt."""
    try:
        events = stored_events(run_dir.monitor_events, marked=[f'"{Hang.NAME}"'.encode()])
        return [event for event in events if isinstance(event, Hang) and event.attempt == attempt]
    except OSError:
        return []


def ranks_of(event: Hang) -> list[int]:
    """The ranks that an event names."""
    return [rank.rank for rank in event.ranks if rank.rank is not None]


def unreachable(run_dir: RunDir, attempt: int) -> list[int]:
    """Returns the ranks on hosts that the monitor could not reach."""
    return [rank for event in hangs(run_dir, attempt) if event.kind == CUT_OFF for rank in ranks_of(event)]


def lost_node(words: Sequence[LastWord], text: str, banner: str, hosts: Mapping[int, str]) -> RunVerdict | None:
    """Returns a verdict if the launcher's text says that a node is lost or did not start its ranks, else None.

    ``banner`` is the end of standard output: rank 0's output, then MPICH's report of deaths. ``hosts`` gives hosts by
    rank, if known before the start.
    """
    host = launcher_messages.lost_node(text, banner)
    if host is None:
        without_word = unreported(words)
        if silent := launcher_messages.silent(text, without_word):
            return host_lost(silent, without_word[silent[0]])
        unstarted, why = launcher_messages.not_started(text)
        return _unstarted(unstarted, why, hosts) if unstarted else None
    if said := launcher_messages.refusal(text, banner, host):
        fix = f"let `ssh {host}` (launch.remote_shell) work from here without a password, or correct launch.hosts"
        verdict = failed_with(Code.NODE, f"{host} could not be reached: {said}", fix, host=host)
        return verdict if PASSES.search(said) else dataclasses.replace(verdict, exit_code=ExitCode.USER_ERROR)
    what = f"{host} was lost, or the launcher's daemon on it" if host else f"a node was lost: {last_line(text)}"
    return failed_with(Code.NODE, what, "the same command resumes it", host=host or None)


def missing_ranks(
    words: Sequence[LastWord], ranks: int, said: str, log: Path, dead: Death | None = None
) -> RunVerdict | None:
    """Returns a verdict on ranks that left no word at all; None if there are none, or ``dead`` is not one of them.

    ``said`` is the launcher's text, stored in ``log``; ``dead`` is a known death.
    """
    missing = set(range(ranks)) - {word.rank for word in words if word.joined or word.error}
    why = startup_error(said)
    if not why and not dead and "RTE ERROR: " in said:
        why = last_line(said)
    if why and len(missing) == ranks and not (dead and dead.signal):  # all attempts would fail in this way
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = f"a process may open only {files} files here: raise that (ulimit -n 4096), or "
        fix = (few if 0 <= files < FILES + FILES_OF_RANK * ranks else "") + f"see {log}"
        code = Code.PREFLIGHT
        if (free := free_bytes(folder := os.environ.get("TMPDIR") or "/tmp")) < LAUNCHER_BYTES:
            code, fix = Code.DISK_FULL, f"{folder} has {free // 1024} KiB free: free space there, or {fix}"
        failed = failed_with(code, f"no rank started: {why}", fix)
        return dataclasses.replace(failed, action=Action.FAIL, before_ranks=True)
    if not missing or (dead and dead.rank in {word.rank for word in words}):
        return None
    reason = f"rank {dead.rank} {dead.cause}" if dead else last_line(said)
    what = f"{len(missing)} of {ranks} ranks ended before they could say why: {reason or 'they printed nothing'}"
    return failed_with(Code.VANISHED, what, f"see {log}", dead.rank if dead else None)


def free_bytes(folder: str) -> float:
    """Free space in a folder; infinite if unknown."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return math.inf


def host_lost(ranks: Sequence[int], host: str, by_slurm: bool = True) -> RunVerdict:
    """Returns the verdict that a host was lost with these ranks; ``by_slurm``: the loss was reported by Slurm."""
    several = f"ranks {', '.join(map(str, ranks[:8]))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    daemon, option = (", or Slurm's daemon on it", f" (--exclude {host})") if by_slurm else ("", "")
    what = f"{host} was lost{daemon}: nothing more was heard from {several}"
    return failed_with(Code.NODE, what, f"if it happens again, leave the host out{option}", ranks[0], host)


def _unstarted(ranks: Sequence[int], why: str, hosts: Mapping[int, str]) -> RunVerdict:
    """Returns the verdict that Slurm did not start these ranks, which does not count against the run."""
    host = hosts.get(ranks[0])
    where = f" on {host}" if host else ""
    what = f"rank {ranks[0]} could not be started{where}: Slurm says {why!r}"
    log = f"slurmd's log{where} shows the cause"
    fix = f"{log}; if it happens again, leave the host out (--exclude {host})" if host else log
    return failed_with(Code.NODE, what, fix, ranks[0], host)
