"""One rank from start to last word: it joins the others, fails together with them, and one rank reports the error."""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.launched import launched_rank
from hpctrain.comm.world import World, alone, connect, in_grid
from hpctrain.config.loading import dump
from hpctrain.config.sections import Config
from hpctrain.errors import Code, ExitCode, HpctrainError, NotAllowed, RunFailed, code_of
from hpctrain.rank.stop_requests import SetUpWatch
from hpctrain.run import last_words
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.decision import decide
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid
from hpctrain.run.last_words import Ending, ErrorWord, LastWord, WordFile, collect, first_word
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR, current_attempt
from hpctrain.run.stop_request import StopRequest, requested_stop
from hpctrain.run.verdict import FIXES
from hpctrain.system import cgroups, foreign_text, processes
from hpctrain.system.files import create_exclusively, open_log
from hpctrain.system.output import LOGGER, quiet_environment, redirect
from hpctrain.system.signals import Interrupted, InterruptibleStopSignals, StopSignals
from hpctrain.system.user_errors import advice_on, advised, own_line, words
from hpctrain.train.hooks import StopReason

COMPANY_S = 3.0
"""Seconds that a failing rank waits to learn whether all other ranks fail too, before it aborts them."""
STACKS_S = 90.0
"""Seconds that a rank waits for MPI to connect it before its stacks are written; less than the supervisor waits."""
EXIT_CODES = {StopReason.REQUESTED: ExitCode.STOPPED}


class StoppedInSetUp(HpctrainError):
    """The run was asked to stop during start-up, before there was anything to save."""

    exit_code = ExitCode.STOPPED
    code = Code.STOPPED


@dataclasses.dataclass(frozen=True)
class RankResult:
    """How a rank's work ended without an error."""

    reason: StopReason
    step: int | None = None
    weights_hash: str | None = None
    """Hash of this rank's model parameters; equal on all ranks that hold the same part of the model."""


class PeerFailed(Exception):
    """Another rank failed and all ranks know it; this rank ends without a message."""

    def __init__(self, rank: int, what: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed: {what}")
        self.rank = rank
        self.exit_code = exit_code


class Agreed(Exception):
    """This rank failed and all ranks know it; ``__cause__`` is the error, ``first`` the lowest rank that failed."""

    def __init__(self, first: int) -> None:
        super().__init__(f"the error of rank {first} is the one that is shown")
        self.first = first


@dataclasses.dataclass
class Session:
    """This rank's connection to the other ranks, the user and the run folder. Made by ``attend``."""

    world: World
    errors: Group
    """All ranks, on a communicator used for errors only, so that one can be reported at any time."""
    signals: StopSignals
    verbose: bool = False
    supervised: bool = False
    raises: bool = False
    """Whether the caller raises the error: with a single rank it is then not shown."""
    run_dir: RunDir | None = None
    holding: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """The run folder's lock, if there is no supervisor to hold it."""
    word: LastWord = dataclasses.field(default_factory=lambda: first_word(None))
    user_stderr: int = 2
    """File descriptor for messages to the user."""
    apart: bool = False
    """Whether ranks did not meet in ``errors``: late ones would take a second exchange for the first."""

    def join(self) -> None:
        """Connects to the other ranks; opens the run folder if a supervisor has named it."""
        with self.announced():
            self.world = connect()
            comm = self.world.everyone.comm
            self.errors = Group("errors", comm.Dup() if comm is not None else None)
        if self.world.nodes > 1:
            mine = last_words.ahead_s(lambda sent: self.world.everyone.allgather(sent, "compare clocks"))
            os.environ[last_words.AHEAD_S] = str(self.world.local.broadcast(mine, "learn how far this clock is ahead"))
        if self.supervised:
            self.open(RunDir(Path(os.environ[RUN_DIR])))

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Context for calls of MPI that may never return: the supervisor sees that this process has started.

        After STACKS_S, the rank's log gets its stacks.
        """
        if not self.supervised:
            yield
            return
        self.run_dir = RunDir(Path(os.environ[RUN_DIR]))
        self.word = dataclasses.replace(first_word(launched_rank(os.environ)), joined=False)
        log = 2
        with contextlib.suppress(HpctrainError, OSError):  # ``open`` reports it, on all ranks
            self.word_file().begin(self.word)
            log = open_log(self.log(), self.run_dir.path)
        faulthandler.dump_traceback_later(STACKS_S, file=log)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            if log != 2:
                os.close(log)

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Context for a part of the start-up that each rank does by itself; if it fails on one rank, it fails on all.

        The body must not communicate with other ranks. A stop request interrupts it, since it may take very long.
        """
        error: Exception | None = None
        try:
            with self.signals.interrupting(), SetUpWatch(what, self.run_dir, self.warn) as watch:
                yield
                if watch.asked():
                    raise Interrupted(signal.SIGTERM)
        except Interrupted as caught:
            asked = (self.run_dir and requested_stop(self.run_dir)) or StopRequest.of_signal(caught.number)
            reason = f"stopped by {asked.by} before training began ({what})"
            error = StoppedInSetUp(reason, "the same command starts it", asked.code)
        except Exception as caught:  # reported to the other ranks first, then raised
            error = caught
        if error is None:
            self.check_peers(what)
        elif (failures := self.exchange(error, what, COMPANY_S * 5)) is not None:
            raise Agreed(lowest_failing(failures)) from error
        else:
            raise error

    def check_peers(self, what: str) -> None:
        """Waits for all ranks; raises PeerFailed if another one reports an error."""
        failures = self.exchange(None, what, TIMEOUT_S) or []
        if any(failures):
            first = lowest_failing(failures)
            raise PeerFailed(first, *failures[first])

    def exchange(self, error: BaseException | None, what: str, timeout_s: float) -> list[Any] | None:
        """Exchanges errors: returns each rank's [message, exit code] or None. Returns None if ranks do not arrive."""
        mine = None if error is None else [message(error)[0], exit_code(error)]
        with contextlib.suppress(RunFailed):
            if not self.apart:
                return self.errors.allgather(mine, what, timeout_s)
        self.apart = True
        return None

    @property
    def folder(self) -> RunDir:
        """The run folder, once it is known."""
        assert self.run_dir is not None
        return self.run_dir

    def join_run(self, config: Config, fresh: bool) -> None:
        """Opens the run folder, and begins an attempt unless a supervisor has done so. Collective.

        ``fresh``: the run begins again.

        Raises:
            UserError: the folder is in use by another live run, or cannot be made.
        """
        if self.run_dir is not None:
            return
        run_dir = RunDir.of(config.name, config.run_dir)
        number = 0
        with self.phase("open the run folder"):
            if self.world.rank == 0:  # in place of a supervisor
                run_dir.create()
                self.holding.enter_context(LiveLock(run_dir, myself()).held())
                attempt = Attempt(ranks=self.world.size, fresh=fresh or None).under(config.parallel)
                number = Attempts(run_dir).begin(attempt, dump(config))
        os.environ[ATTEMPT] = str(self.errors.broadcast(number, "learn the attempt's number"))
        self.open(run_dir)

    def arrange(self, tensor: int, pipeline: int) -> None:
        """Puts the ranks into tensor and pipeline groups of these sizes. Collective; raises UserError on all ranks."""
        self.world = in_grid(self.world, tensor, pipeline)

    def open(self, run_dir: RunDir) -> None:
        """Writes this rank's first word into the run folder and redirects output to its log."""
        self.run_dir = run_dir
        self.word = first_word(self.world.rank, cgroups.oom_kills())
        with self.phase("write into the run folder"):
            self.word_file().begin(self.word)
        if (self.supervised or self.world.size > 1 or not self.raises) and not self.verbose:
            self.user_stderr = redirect(self.log(), run_dir.path, keep_stdout=self.world.rank == 0)

    def log(self) -> Path:
        """Path of this rank's log."""
        return self.folder.log("x" if self.word.rank is None else self.word.rank, current_attempt())

    def word_file(self) -> WordFile:
        """File of this rank's last word."""
        return WordFile.of(self.folder, current_attempt(), self.word)

    def end(self, ending: Ending, code: int, **fields: Any) -> None:
        """Writes the last word."""
        self.word = dataclasses.replace(self.word, ending=ending, exit_code=code, ended=last_words.now(), **fields)
        if self.run_dir is not None:
            self.word_file().end(self.word)

    def reached(self, step: int) -> None:
        """Stores the current step for the last word."""
        self.word = dataclasses.replace(self.word, step=step)

    def finish(self, outcome: RankResult) -> int:
        """Ends this rank after all ranks succeeded; returns the exit code. Collective."""
        code = EXIT_CODES.get(outcome.reason, ExitCode.DONE)
        self.check_peers("end")
        self.end(Ending(outcome.reason.value), code, step=outcome.step, weights_hash=outcome.weights_hash)
        if self.supervised:
            return ExitCode.DONE  # mpirun takes any other code for a failure; the supervisor reads the last word
        self.errors.barrier("leave their last words")
        self.conclude()
        return code

    def fail(self, error: BaseException, first: int | None) -> int:
        """Ends this rank with an error; returns the exit code. Aborts the other ranks unless they have failed too.

        Args:
            error: the error.
            first: the lowest failing rank, if the ranks have agreed on it.
        """
        if isinstance(error, NotAllowed) and self.word.step:  # it was allowed before: a ticket may have expired
            error = RunFailed(error.what, error.fix).with_traceback(error.__traceback__)
        what, fix = message(error)
        trace = "".join(traceback.format_exception(error))
        code = exit_code(error)
        self.end(Ending.FAILED, code, error=ErrorWord(what, fix, type(error).__name__, trace, code_of(error)))
        unexpected = not isinstance(error, HpctrainError)
        shown = not (self.raises and self.world.size == 1)
        if shown and (self.user_stderr != 2 or self.verbose or (unexpected and self.world.size == 1)):
            with contextlib.suppress(OSError):  # the log's disk may be full; the other ranks must still be ended
                foreign_text.show(trace, sys.stderr)
        if first is None and (failures := self.exchange(error, "see who else fails", COMPANY_S)) is not None:
            first = lowest_failing(failures)
        if not self.supervised and self.shows(first):
            if shown:
                self.tell(what, fix)
            self.conclude()
        if first is None and self.errors.comm is not None:
            self.errors.comm.Abort(code)
        return code

    def shows(self, first: int | None) -> bool:
        """Whether this rank reports to the user: exactly one does, however many fail."""
        if first is not None:
            return first == self.world.rank
        if self.run_dir is None:
            return True
        try:
            return create_exclusively(self.word_file().path.with_name("told"), b"", self.folder.path)
        except HpctrainError:
            return True

    def tell(self, what: str, fix: str) -> None:
        """Shows the error message to the user."""
        place = Grid(self.world.size, self.world.tensor.size, self.world.pipeline.size).label(self.world.rank)
        where = f"rank {self.world.rank}{place} on {self.world.host}: " if self.world.size > 1 else ""
        LOGGER.error("%s%s; fix: %s", where, what, fix)
        logged = self.user_stderr != 2 and self.run_dir is not None
        trace = f"\n  traceback: {self.log()}" if logged else ""
        self.write(self.user_stderr, f"{where}{what}\n  fix: {fix}{trace}")

    def warn(self, text: str) -> None:
        """Shows a warning to the user; call it on rank 0. Under a supervisor only standard output reaches the user."""
        LOGGER.warning("%s", text)
        self.write(1 if self.supervised else self.user_stderr, text)

    def write(self, descriptor: int, text: str) -> None:
        """Writes a message; ignores errors."""
        with contextlib.suppress(OSError):
            os.write(descriptor, f"hpctrain: {foreign_text.plain(text)}\n".encode())

    def leave(self) -> None:
        """Cleans up what a later call in the same process must not find."""
        if not self.supervised:
            os.environ.pop(ATTEMPT, None)
        if self.user_stderr != 2:
            os.close(self.user_stderr)

    def conclude(self) -> None:
        """Ends the attempt in place of a supervisor: records the verdict, merges the last words, releases the lock."""
        if self.run_dir is None or not (self.world.rank == 0 or self.word.ending is Ending.FAILED):
            return
        with contextlib.suppress(HpctrainError, OSError):
            number = current_attempt()
            words = collect(self.run_dir, number)
            attempts = Attempts(self.run_dir)
            verdict = decide(words, attempts.all(), max_failures=sys.maxsize)
            all_told = len(words) == self.world.size and all(word.ending is not Ending.RUNNING for word in words)
            attempts.end(number, verdict, words, all_told)
        self.holding.close()


@dataclasses.dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, and the error if there was one."""

    exit_code: int
    error: BaseException | None = None


def attend(body: Callable[[Session], RankResult], verbose: bool = False, raises: bool = False) -> End:
    """Connects to the other ranks, calls ``body`` and leaves a last word.

    ``body`` runs parts of its start-up within ``session.phase``. An error there, or one that all ranks share, ends all
    ranks and is shown once. Any other error is shown by one of the failing ranks, which ends the others by MPI_Abort
    within seconds.

    Args:
        body: the rank's work; returns its result.
        verbose: do not redirect output.
        raises: the caller will raise the error, so a single rank does not show it.
    """
    os.environ.update(quiet_environment(verbose, os.environ))
    supervised = RUN_DIR in os.environ
    if processes.TETHER in os.environ:
        processes.die_with_parent()
    signals = StopSignals() if supervised else InterruptibleStopSignals()
    signals.install()
    session = Session(alone(), Group("errors"), signals, verbose, supervised, raises)
    try:
        session.join()
        return End(session.finish(body(session)))
    except PeerFailed as error:
        session.end(Ending.TAKEN_DOWN, error.exit_code, note=str(error))
        if not supervised and session.world.rank == 0:
            session.conclude()
        return End(error.exit_code, error)
    except Agreed as agreed:
        assert agreed.__cause__ is not None
        return End(session.fail(agreed.__cause__, agreed.first), agreed.__cause__)
    except BaseException as error:
        return End(session.fail(error, None), error)
    finally:
        signals.restore()
        session.leave()


def lowest_failing(failures: Sequence[Any]) -> int:
    """Returns the lowest rank that reports an error; at least one must."""
    return next(rank for rank, entry in enumerate(failures) if entry is not None)


def message(error: BaseException) -> tuple[str, str]:
    """Returns what to say about an error, and the fix: an HpctrainError's own text, else type, text and line."""
    if isinstance(error, HpctrainError):
        return error.what, error.fix
    if isinstance(error, (KeyboardInterrupt, bdb.BdbQuit)):
        return "interrupted before the current step had ended", "the same command resumes from the last checkpoint"
    if isinstance(error, SystemExit):
        return f"the program called sys.exit({error.code!r}) during the run{own_line(error)}", "remove that call"
    text = words(error)
    fix = FIXES.get(code_of(error)) or advised("the traceback in the rank's log shows where it comes from", text)
    return f"{type(error).__name__}: {text}{own_line(error)}", fix


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a rank that ends with this error; sys.exit and errors with advice are the user's."""
    if isinstance(error, HpctrainError):
        return int(error.exit_code)
    is_users = isinstance(error, SystemExit) or (isinstance(error, Exception) and advice_on(words(error)))
    return int(ExitCode.USER_ERROR if is_users else ExitCode.FAILURE)
