"""Finds out, after an attempt, what happened to ranks that left no last word."""

from __future__ import annotations

import dataclasses
import re
import resource
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
    unreported = {word.rank: word.host for word in words if word.ended is None and word.rank is not None}
    found: list[Fact] = [*words, *launcher_messages.deaths(text + banner)]
    found += [Death(rank, exit_code=0, standing=Standing.LEFT) for rank in launcher_messages.left(text, unreported)]
    for at, noted, code, alone in map(dataclasses.astuple, noted_deaths(run_dir, attempt)):
        how = {"signal": -code} if (code or 0) < 0 else {"exit_code": code}
        found.append(Death(noted, standing=Standing.NOTED if alone else Standing.SWEPT, at=at, **how))
    for event in _hangs(run_dir, attempt):
        about = [rank.rank for rank in event.ranks if rank.rank is not None]
        if event.kind == "died":
            found += [Death(rank, standing=Standing.GONE) for rank in about]
        elif event.kind == CUT_OFF and about and unreported.keys() >= set(about):
            verdict = lost(about, unreported[about[0]], by_slurm=False)
            # Code.NODE would say the node is lost, and the host may only be cut off for a while.
            found.append(Found(Standing.CUT_OFF, dataclasses.replace(verdict, code=Code.VANISHED)))
        elif event.kind == "hung" and event.action == "abort":
            what = event.sentence or "no rank made progress"
            fix = f"the stacks are in {run_dir.monitor}; the same command resumes from the last checkpoint"
            found.append(Found(Standing.HUNG, failed_with(Code.HANG, what, fix, next(iter(about), None))))
    return found


def complete(words: Sequence[LastWord], cause: Fact | None) -> list[LastWord]:
    """Returns the last words, with endings filled in for ranks that left none, one of which may be the cause."""
    others = isinstance(cause, Death) or any(word.ending is Ending.FAILED for word in words)
    rest = Ending.TAKEN_DOWN if others else Ending.VANISHED

    def completed(word: LastWord) -> LastWord:
        if word.ending is not Ending.RUNNING:
            return word
        if not isinstance(cause, Death) or cause.rank != word.rank:
            return dataclasses.replace(word, ending=rest)
        local = cause.signal == signal.SIGKILL and word.host == socket.gethostname()
        starved = cause.out_of_memory or (local and processes.ran_out_of_memory(word.pid, word.birth, word.oom_kills))
        death = dataclasses.replace(cause, out_of_memory=starved)
        exit_code = death.status or None
        return dataclasses.replace(word, ending=Ending.KILLED, note=death.cause, code=death.code, exit_code=exit_code)

    return [completed(word) for word in words]


def opening(text: str) -> str:
    """Returns the first sentence in which MPI or mpirun says why no rank could start; empty if there is none."""
    banners = [each for each in RULE.split(text)[1::2] if each.strip() and not ABOUT_RANKS.match(each)]
    return " ".join(banners[0].strip().partition("\n\n")[0].split()).partition(". ")[0][:300] if banners else ""


def last_line(text: str) -> str:
    """Returns the last non-empty line of a launcher's text, or the first paragraph of a banner at its end."""
    *before, banner, rest = ["", *RULE.split(text.rstrip())]
    if before and not rest:
        return " ".join(banner.strip().partition("\n\n")[0].split())[:300]
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=\t")]
    return lines[-1][:300] if lines else ""


def all_ended_well(words: Sequence[LastWord], ranks: int) -> bool:
    """Whether every rank's last word reports a good ending."""
    return len(words) == ranks and all(word.ending in GOOD_ENDINGS for word in words)


def _hangs(run_dir: RunDir, attempt: int) -> list[Hang]:
    """Returns the monitor's events about ranks that hung, died or were cut off in an attempt."""
    try:
        events = stored_events(run_dir.monitor_events, marked=[f'"{Hang.NAME}"'.encode()])
        return [event for event in events if isinstance(event, Hang) and event.attempt == attempt]
    except OSError:
        return []


def unreachable(run_dir: RunDir, attempt: int) -> list[int]:
    """Returns the ranks on hosts that the monitor could not reach."""
    cut_off = [event for event in _hangs(run_dir, attempt) if event.kind == CUT_OFF]
    return [rank.rank for event in cut_off for rank in event.ranks if rank.rank is not None]


def lost_node(words: Sequence[LastWord], text: str, banner: str, hosts: Mapping[int, str]) -> RunVerdict | None:
    """Returns a verdict if the launcher's text says that a node is lost or did not start its ranks, else None.

    ``banner`` is the end of standard output: rank 0's output, then MPICH's report of deaths. ``hosts`` gives hosts by
    rank, if known before the start.
    """
    if (host := launcher_messages.lost_node(text, banner)) is not None:
        if said := launcher_messages.refusal(text, banner, host):
            fix = f"let `ssh {host}` (launch.remote_shell) work from here without a password, or correct launch.hosts"
            verdict = failed_with(Code.NODE, f"{host} could not be reached: {said}", fix, host=host)
            return verdict if PASSES.search(said) else dataclasses.replace(verdict, exit_code=ExitCode.USER_ERROR)
        what = f"{host} was lost, or the launcher's daemon on it" if host else f"a node was lost: {last_line(text)}"
        return failed_with(Code.NODE, what, "the same command resumes it", host=host or None)
    unreported = {word.rank: word.host for word in words if word.ended is None and word.rank is not None}
    if silent := launcher_messages.silent(text, unreported):
        return lost(silent, unreported[silent[0]])
    unstarted, why = launcher_messages.not_started(text)
    return _unstarted(unstarted, why, hosts) if unstarted else None


def missing_ranks(
    words: Sequence[LastWord], ranks: int, said: str, log: Path, dead: Death | None = None
) -> RunVerdict | None:
    """Returns a verdict on ranks that left no word at all; None if there are none, or ``dead`` is not one of them.

    ``said`` is the launcher's text, stored in ``log``; ``dead`` is a known death.
    """
    missing = set(range(ranks)) - {word.rank for word in words if word.joined or word.error}
    why = opening(said) or ("" if dead or "RTE ERROR: " not in said else last_line(said))
    if why and len(missing) == ranks and not (dead and dead.signal):  # all attempts would fail in this way
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = f"a process may open only {files} files here: raise that (ulimit -n 4096), or "
        fix = (few if 0 <= files < FILES + FILES_OF_RANK * ranks else "") + f"see {log}"
        failed = failed_with(Code.PREFLIGHT, f"no rank started: {why}", fix)
        return dataclasses.replace(failed, action=Action.FAIL, before_ranks=True)
    if not missing or (dead and dead.rank in {word.rank for word in words}):
        return None
    reason = f"rank {dead.rank} {dead.cause}" if dead else last_line(said)
    what = f"{len(missing)} of {ranks} ranks ended before they could say why: {reason or 'they printed nothing'}"
    return failed_with(Code.VANISHED, what, f"see {log}", dead.rank if dead else None)


def lost(ranks: Sequence[int], host: str, by_slurm: bool = True) -> RunVerdict:
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
