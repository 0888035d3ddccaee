"""``python -m hpctrain.programs.plain_command PROGRAM ARGUMENTS``: runs any program as one rank of a run.

The program gets a log, stop requests (as a signal) and a last word, as hpctrain's own ranks do, and the environment
variables that its own launcher would set. It need not import hpctrain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.comm.launched import EXPECTED_RANKS, launched_rank
from hpctrain.errors import Code, ExitCode, HpctrainError, Replaced, UserError, code_of_text, file_errors
from hpctrain.programs.folder_group import FolderGroup, MeetingStopped, Place, place_of
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, ErrorWord, LastWord, WordFile, first_word
from hpctrain.run.live_lock import BEAT_S
from hpctrain.run.rank_environment import CONVENTION, PLACE, RUN_DIR, STOP_SIGNAL, WATCHED_DIR, current_attempt
from hpctrain.run.stop_request import is_asked_to_stop
from hpctrain.run.verdict import FIXES
from hpctrain.system import cgroups, processes
from hpctrain.system.address import LOOPBACK, Interface, interfaces, meeting_address
from hpctrain.system.output import redirect
from hpctrain.system.signals import StopSignals, signal_name

TICK_S = 0.1
POLL_S = 2.0
"""Seconds between checks for the STOP file."""
LOOKED_AT_BYTES = 1 << 16
TRACEBACK = re.compile(
    r"^(.*?)(?:Exception Group )?Traceback \(most recent call last\):\n(?:\1[ \t].*\n)*\1(\S.*)", re.MULTILINE
)
"""A traceback; each line may have the same prefix, since PyTorch prefixes lines with the rank."""
GROUP_MARGIN = re.compile(r"^ *(?:[+|]-*(?: \d+ -*)?(?: |$))+", re.MULTILINE)
"""What Python draws to the left of an ExceptionGroup's traceback, and between its parts."""
MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
"""How Python says that a module, or the package around it, is not installed."""
ERROR_LINE = re.compile(r"^([A-Za-z_][\w.]*: .*)", re.MULTILINE)
OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError")
"""Errors by which a launcher within the program reports that the program failed."""
ENDING = re.compile(r"\b(_shutdown \(threading\.py|_python_exit \(|Failed to find a python interpreter)")
"""What py-spy says of a Python program that has ended and waits for its threads, or for other ranks in MPI_Finalize."""
SILENT_S = 5.0
"""Seconds without output after a traceback before a program is examined."""
LONGEST_LINE = 300
"""Characters of a program's last line that are quoted."""
MOST_LINES = 6
"""Lines of an error that are read after the first: NCCL gives its cause in the last but one."""
OTHERS = re.compile(r"^.*(?:terminate called|Traceback)|^[\[=]", re.MULTILINE)
"""Begin of what is printed after an error and is not part of it."""
LONGEST_VARIABLE = 32 * os.sysconf("SC_PAGE_SIZE")
"""Bytes of an environment variable with its name from which the kernel does not start a program (MAX_ARG_STRLEN)."""
KILL_GRACE_S = 5.0
"""Seconds between asking the program to end and killing it, if a newer attempt has replaced this one."""


def main() -> int:
    """Runs the program and returns the exit code.

    Returns 0 for good endings, after a stop request too, so that the launcher does not end the other ranks.
    """
    run_dir, attempt = RunDir(Path(os.environ[RUN_DIR])), current_attempt()
    processes.die_with_parent()
    word = first_word(launched_rank(os.environ), cgroups.oom_kills())
    file = WordFile.of(run_dir, attempt, word)
    file.begin(word)
    log = run_dir.log("x" if word.rank is None else word.rank, attempt)
    redirect(log, run_dir.path, keep_stdout=word.rank == 0)
    signals = StopSignals()
    signals.install()
    try:
        port, environment = program_environment(run_dir, attempt, word, signals)
        child = start_program(sys.argv[1:], environment, signals)
    except MeetingStopped:
        file.end(dataclasses.replace(word, ending=Ending.STOPPED, ended=time.time(), exit_code=ExitCode.STOPPED))
        return ExitCode.DONE
    except HpctrainError as error:
        file.end(failed(word, error))
        return error.exit_code
    try:
        asked, code = watch(child, run_dir, attempt, word.rank, signals, log)
    except Replaced as error:
        processes.end_process(child, KILL_GRACE_S)
        file.end(failed(word, error))
        return error.exit_code
    port.close()
    starved = code == -signal.SIGKILL and processes.ran_out_of_memory(child.pid, word.birth, word.oom_kills)
    last = ending(word, sys.argv[1], code, asked, said_last(log), starved)
    file.end(dataclasses.replace(last, ended=time.time()))
    return last.exit_code if last.ending is Ending.FAILED and last.exit_code else ExitCode.DONE


def start_program(
    words: Sequence[str], environment: Mapping[str, str], signals: StopSignals
) -> subprocess.Popen[bytes]:
    """Starts the program. From now on it handles the signals that are sent to all processes of this rank.

    Raises:
        MeetingStopped: a stop signal has arrived already.
        UserError: the program cannot be run.
    """

    def become_program() -> None:
        processes.die_with_parent()
        signals.leave_to_program()

    with signals.held():
        if signals.received:
            raise MeetingStopped("the program was not started: a stop was requested", "nothing to do")
        with file_errors(f"cannot run {words[0]}", "correct launch.command"):
            # there is one thread here, so a preexec_fn is safe
            return subprocess.Popen(words, env=environment, preexec_fn=become_program)  # noqa: PLW1509


def program_environment(
    run_dir: RunDir, attempt: int, word: LastWord, signals: StopSignals
) -> tuple[socket.socket, dict[str, str]]:
    """Reserves a port for the program and returns it with the program's environment.

    Collective, unless this rank does not know its number.

    Raises:
        MeetingStopped: the run was asked to stop.
        RunFailed: the other ranks did not arrive.
    """
    # The program may use hpctrain itself, with a separate run folder.
    environment = {name: value for name, value in os.environ.items() if name not in (RUN_DIR, CONVENTION)}
    convention, *given = os.environ.get(CONVENTION, "mpi").split()
    port, size = reserve_port(), int(os.environ.get(EXPECTED_RANKS) or 1)
    if word.rank is None or word.rank >= size:
        return port, environment
    group = FolderGroup("program", run_dir, attempt, word.rank, size, lambda: bool(signals.received))
    mine = [word.host, port.getsockname()[1], [dataclasses.astuple(each) for each in interfaces()]]
    hosts, ports, networks = zip(*group.allgather(mine, "say where they are"), strict=True)
    place = place_of(word.rank, hosts)
    master = master_of([*zip(hosts, networks, strict=True)])
    ours = variables(convention, place, [*zip(hosts, ports, strict=True)], master)
    environment |= {name: value for name, value in ours.items() if name not in given}
    return port, environment | {PLACE: json.dumps(dataclasses.asdict(place)), WATCHED_DIR: str(run_dir.path)}


def master_of(interfaces_of_ranks: Sequence[tuple[str, Sequence[Sequence[Any]]]]) -> str | None:
    """Returns rank 0's address on the fastest network that all hosts share; None if they share none.

    None too if hosts have equal addresses, as nodes of one machine do: their names tell them apart, if anything does.

    Args:
        interfaces_of_ranks: for each rank, its host and the fields of each ``Interface``.
    """
    by_host = {host: [Interface(*fields) for fields in found] for host, found in reversed(interfaces_of_ranks)}
    own = by_host.pop(interfaces_of_ranks[0][0])
    address = meeting_address(own, [[each.address for each in others] for others in by_host.values()])
    return None if by_host and address == LOOPBACK else address


def variables(
    convention: str, place: Place, addresses: Sequence[tuple[str, int]], master: str | None = None
) -> dict[str, str]:
    """Returns the environment variables of a rank.

    Args:
        convention: ``torch`` (as torchrun sets them), ``tensorflow`` (TF_CONFIG, all ranks are workers), ``auto``
            (both, but no TF_CONFIG that is too long), or ``mpi`` (none: the launcher's own suffice).
        place: place of the rank.
        addresses: host and free port of each rank, by rank. If there is only one node, 127.0.0.1 replaces the host.
        master: MASTER_ADDR; by default rank 0's host.

    Raises:
        UserError: TF_CONFIG, which names all ranks, would be longer than the kernel allows.
    """
    reached = [("127.0.0.1" if place.nodes == 1 else host, port) for host, port in addresses]
    found: dict[str, str] = {}
    if convention in ("torch", "auto"):
        numbers = {
            "RANK": place.rank,
            "WORLD_SIZE": place.size,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_WORLD_SIZE": place.local_size,
            "GROUP_RANK": place.node,
            "MASTER_PORT": reached[0][1],
        }
        found |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": master or reached[0][0]}
    if convention in ("tensorflow", "auto"):
        workers = [f"{host}:{port}" for host, port in reached]
        task = {"type": "worker", "index": place.rank}
        named = json.dumps({"cluster": {"worker": workers}, "task": task})
        if len(f"TF_CONFIG={named}") < LONGEST_VARIABLE:
            found["TF_CONFIG"] = named
        elif convention == "tensorflow":
            what = f"TF_CONFIG would name {place.size} ranks and be longer than the kernel allows"
            raise UserError(what, "start fewer ranks, or set launch.convention: mpi")
    return found


def reserve_port() -> socket.socket:
    """Reserves a free port of this host for as long as the returned socket is open.

    The socket does not listen and sets SO_REUSEADDR, as servers do. So the program can listen on the port at any time,
    and the kernel gives it to no other process until then.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def failed(word: LastWord, error: HpctrainError) -> LastWord:
    """Returns the last word of a rank that ends with an error of hpctrain."""
    why = ErrorWord(error.what, error.fix, type(error).__name__, "", error.code)
    return dataclasses.replace(word, ending=Ending.FAILED, ended=time.time(), exit_code=error.exit_code, error=why)


def watch(
    child: subprocess.Popen[bytes], run_dir: RunDir, attempt: int, number: int | None, signals: StopSignals, log: Path
) -> tuple[bool, int]:
    """Waits for the program to end; returns whether the run was asked to stop, and the exit code.

    A program whose main thread has failed is ended if other threads, or ranks, keep it alive. If a STOP file appears,
    sends the program the stop signal, once. A signal to this process is not forwarded: schedulers send it to all
    processes of a rank, and the program may need time to end.

    Raises:
        Replaced: this is rank 0, and a newer attempt has begun. The program is still running.
    """
    asked, next_look, next_look_at_fence = False, 0.0, 0.0
    while True:
        try:
            return asked or bool(signals.received), child.wait(TICK_S)
        except subprocess.TimeoutExpired:
            pass
        if number == 0 and time.monotonic() >= next_look_at_fence:  # rank 0 suffices: its failure ends the others
            next_look_at_fence = time.monotonic() + BEAT_S
            with contextlib.suppress(OSError):  # the file server does not answer at the moment
                Attempts(run_dir).check_fence(attempt)
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + POLL_S
            with contextlib.suppress(OSError):
                if has_failed(child.pid, log):
                    processes.end_process(child, KILL_GRACE_S)
                    return asked or bool(signals.received), 1
            if not asked and (asked := is_asked_to_stop(run_dir)):
                number_of_stop = signal.Signals[os.environ.get(STOP_SIGNAL, "SIGTERM")]
                if number_of_stop not in signals.received:  # if it is, the program has received it too
                    child.send_signal(number_of_stop)


def has_failed(pid: int, log: Path) -> bool:
    """Whether a Python program's main thread has ended with an error, and waits for other threads or ranks to end."""
    end = end_of(log)
    found = list(TRACEBACK.finditer(end))
    if not found or end[found[-1].end() :].count("\n") > 2 or time.time() - os.path.getmtime(log) < SILENT_S:
        return False
    from hpctrain.monitor.node.stacks import with_py_spy

    stack, why = with_py_spy(pid)
    return ENDING.search(stack or why) is not None


def said_last(log: Path) -> str:
    """Returns the error of the last traceback near the end of a log, with lines that follow; or the log's last line.

    A traceback comes first because libraries may print more as they shut down. Of an ExceptionGroup, the first part is
    added; a launcher's own traceback counts only if there is no other.
    """
    end = GROUP_MARGIN.sub("", end_of(log))
    found = list(TRACEBACK.finditer(end))
    if not found:
        lines = [line for line in end.split("\n") if line.strip()]
        plain = [line for line in lines if not line.startswith((" ", "\t", "[", "="))] or lines
        return plain[-1].strip() if plain else ""
    own = [each for each in found if not any(name in each[2] for name in OF_LAUNCHERS)] or found
    error = own[-1][2].strip()
    rest = end[own[-1].end() :].replace(f"\n{own[-1][1]}", "\n")
    part = ERROR_LINE.search(rest) if "sub-exception" in error else None
    more = OTHERS.split(rest, maxsplit=1)[0].strip("\n").split("\n")[:MOST_LINES]
    return f"{error}: {part[1].strip()}" if part else "\n".join([error, *more]).rstrip()


def end_of(log: Path) -> str:
    """Returns the last part of a log; empty if it cannot be read."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOOKED_AT_BYTES))
        return file.read().decode(errors="replace")
    return ""


def ending(
    word: LastWord, program: str, code: int, asked: bool, said: str = "", out_of_memory: bool = False
) -> LastWord:
    """Returns the last word for the program's exit code; pure. Negative codes are signals, as in ``subprocess``.

    ``said`` is the last line of its output, or its error, whose first line is quoted; ``asked``: the run was asked to
    stop.
    """
    final = code in (ExitCode.USER_ERROR, ExitCode.DO_NOT_REQUEUE)
    if code == ExitCode.STOPPED or (asked and not final):
        # a program that ends with 0 has either stopped or come to its end at that moment
        return dataclasses.replace(word, ending=Ending.STOPPED, exit_code=ExitCode.STOPPED if code else ExitCode.DONE)
    if code == ExitCode.DONE:
        return dataclasses.replace(word, ending=Ending.COMPLETED, exit_code=ExitCode.DONE)
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    by_itself = code > 0 or code == -signal.SIGABRT  # a failing program may abort while its libraries shut down
    how = f"{program} {how}" + (f" ({said.splitlines()[0][:LONGEST_LINE]})" if said and by_itself else "")
    why = code_of_text(said) if by_itself else Code.KILLED
    missing = MISSING.search(said)
    fix = install(missing[1], program) if missing else FIXES.get(why, "see the rank's log")
    error = ErrorWord(how, fix, "exit", "", why)
    if out_of_memory:
        fix = "request more memory (launch.slurm.memory), or start fewer ranks on each node"
        error = ErrorWord(f"{program} was killed by the kernel: out of memory", fix, "exit", "", Code.OUT_OF_MEMORY)
    return dataclasses.replace(word, ending=Ending.FAILED, exit_code=code if code > 0 else 128 - code, error=error)


def install(module: str, program: str) -> str:
    """Returns advice for a program that cannot import a module; this Python may have it."""
    here = f", such as {sys.executable}" if importlib.util.find_spec(module) else ""
    return f"install {module} for {program}, or start the program with a Python that has it{here}"


if __name__ == "__main__":
    sys.exit(main())
