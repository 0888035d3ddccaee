"""``python -m hpctrain.rank.plain_command program arguments``: one rank of a plain command.

The program gets what our own ranks have: a log, a stop request as a signal, and a last word. It need not know us.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import Code, ExitCode, Replaced
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, ErrorWord, LastWord, WordFile, first_word
from hpctrain.run.live_lock import BEAT_S
from hpctrain.run.rank_environment import RUN_DIR, STOP_SIGNAL, current_attempt
from hpctrain.system import cgroups, processes
from hpctrain.system.output import redirect
from hpctrain.system.signals import StopSignals, signal_name

RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""What launchers call a rank's number. Under mpirun SLURM_PROCID is the daemon's, so it comes last."""
TICK_S = 0.1
POLL_S = 2.0
"""Seconds between two looks for the STOP file."""
KILL_GRACE_S = 5.0
"""Seconds between asking the program to end and killing it, when the run has moved elsewhere."""


def main() -> int:
    """Runs the program to its end; 0 for good ends, so that launchers leave the other ranks alone."""
    run_dir, attempt = RunDir(Path(os.environ[RUN_DIR])), current_attempt()
    processes.die_with_parent()
    word = first_word(rank(os.environ), cgroups.oom_kills())
    file = WordFile.of(run_dir, attempt, word)
    file.begin(word)
    log = run_dir.log("x" if word.rank is None else word.rank, attempt)
    redirect(log, run_dir.path, keep_stdout=word.rank == 0)
    signals = StopSignals()
    signals.install()
    # The program may be one of ours with a run folder of its own.
    environment = {name: value for name, value in os.environ.items() if name != RUN_DIR}
    try:
        # There is one thread here, so a preexec_fn is safe.
        child = subprocess.Popen(sys.argv[1:], env=environment, preexec_fn=processes.die_with_parent)  # noqa: PLW1509
    except OSError as error:
        what = f"cannot run {sys.argv[1]}: {error.strerror}"
        why = ErrorWord(what, "correct launch.command", type(error).__name__, "", Code.USER_ERROR)
        file.end(failed(word, why, ExitCode.USER_ERROR))
        return ExitCode.USER_ERROR
    try:
        asked = watch(child, run_dir, attempt, word.rank, signals)
    except Replaced as error:
        end(child)
        file.end(failed(word, ErrorWord(error.what, error.fix, type(error).__name__, "", error.code), error.exit_code))
        return error.exit_code
    last = ending(word, sys.argv[1], child.returncode, asked)
    file.end(dataclasses.replace(last, ended=time.time()))
    return last.exit_code if last.ending is Ending.FAILED and last.exit_code else ExitCode.DONE


def failed(word: LastWord, why: ErrorWord, code: ExitCode) -> LastWord:
    """The word of a rank that ends now, by an error of ours."""
    return dataclasses.replace(word, ending=Ending.FAILED, ended=time.time(), exit_code=code, error=why)


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends the program, by force if it does not end by itself."""
    child.terminate()
    try:
        child.wait(KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def watch(
    child: subprocess.Popen[bytes], run_dir: RunDir, attempt: int, number: int | None, signals: StopSignals
) -> bool:
    """Waits for the program's end and passes a stop request on, once; whether there was one.

    A signal is not passed on: schedulers send it to all processes of a rank, and the program may need its time to end.

    Raises:
        Replaced: rank 0 has found that a newer attempt has begun. The program still runs.
    """
    asked, next_look, next_look_at_fence = False, 0.0, 0.0
    while True:
        try:
            child.wait(TICK_S)
            return asked or bool(signals.received)
        except subprocess.TimeoutExpired:
            pass
        if number == 0 and time.monotonic() >= next_look_at_fence:  # if it ends, the others are ended
            next_look_at_fence = time.monotonic() + BEAT_S
            with contextlib.suppress(OSError):  # a file server that does not answer now
                Attempts(run_dir).check_fence(attempt)
        if not asked and time.monotonic() >= next_look:
            next_look = time.monotonic() + POLL_S
            if asked := run_dir.stop_file.exists():
                number_of_stop = signal.Signals[os.environ.get(STOP_SIGNAL, "SIGTERM")]
                if number_of_stop not in signals.received:  # else the program has got it, too
                    child.send_signal(number_of_stop)


def ending(word: LastWord, program: str, code: int, asked: bool) -> LastWord:
    """What the program's exit code means; pure. Negative codes are signals, as ``subprocess`` has it."""
    final = code in (ExitCode.USER_ERROR, ExitCode.DO_NOT_REQUEUE)
    if code == ExitCode.STOPPED or (asked and not final):
        return dataclasses.replace(word, ending=Ending.STOPPED, exit_code=ExitCode.STOPPED)
    if code == ExitCode.DONE:
        return dataclasses.replace(word, ending=Ending.COMPLETED, exit_code=ExitCode.DONE)
    if code < 0:
        how = f"{program} was killed by {signal_name(-code)}"
    else:
        how = f"{program} ended with exit code {code}"
    error = ErrorWord(how, "see the rank's log", "exit", "", Code.EXCEPTION)
    return dataclasses.replace(word, ending=Ending.FAILED, exit_code=code if code > 0 else 128 - code, error=error)


def rank(environ: Mapping[str, str]) -> int | None:
    """This process's number, from its launcher's variables; 0 without a launcher."""
    found = next((environ[name] for name in RANK_VARIABLES if environ.get(name)), "0")
    return int(found) if found.isdigit() else None


if __name__ == "__main__":
    sys.exit(main())
